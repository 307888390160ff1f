"""`python -m layerzero` is the `lz` command."""

from .cli import main

if __name__ == "__main__":
    main()
