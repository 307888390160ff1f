"""What is here: hardware, builds, loading libraries, memory, locks between processes."""
