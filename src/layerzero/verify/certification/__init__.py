"""What a certificate demands beyond single calls, and why a kernel failed."""
