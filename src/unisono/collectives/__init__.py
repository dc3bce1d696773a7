"""Collectives of any value over a process group, and the checks that find ranks which call different things."""
