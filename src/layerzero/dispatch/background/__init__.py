"""What goes on behind the calls: compiling, and learning which kernel is fastest."""
