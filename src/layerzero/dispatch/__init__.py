"""The call: from arguments to the kernel that serves them."""
