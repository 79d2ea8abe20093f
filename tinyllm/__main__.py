"""`python -m tinyllm` is the `tinyllm` command."""

from tinyllm.cli import main

if __name__ == "__main__":
    main()
