"""What a certificate demands beyond single calls."""
