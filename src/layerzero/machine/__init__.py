"""What this machine has: hardware, installed builds, loadable libraries, memory, locks."""
