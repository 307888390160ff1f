"""May this be released? The stages of `lz gate`, and the soak that one of them runs."""
