"""What ranks print on its way to the terminal and to log files: whole lines, folded, prefixed, kept."""
