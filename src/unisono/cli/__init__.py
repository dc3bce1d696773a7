"""The command line: it parses and prints, nothing else."""
