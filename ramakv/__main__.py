"""`python -m ramakv` is the `ramakv` command."""

from ramakv.cli import main

if __name__ == "__main__":
    main()
