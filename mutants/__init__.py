"""The planted bugs, as data. `python -m mutants PATH` grades tests by them; the wheel has the files alone."""
