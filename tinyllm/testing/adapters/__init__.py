"""What makes a cache of a name on a command line, of a program behind a pipe, of a manager of block ids."""
