"""The output of ranks on its way to the terminal and to log files: as whole lines, merged, prefixed, kept."""
