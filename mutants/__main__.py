"""`python -m mutants PATH` is `tinyllm grade PATH`."""

import sys

from tinyllm.cli import main

if __name__ == "__main__":
    main(["grade", *sys.argv[1:]])
