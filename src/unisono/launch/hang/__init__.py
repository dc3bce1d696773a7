"""What ranks are doing right now, read from outside: pages in shared memory, stacks, and who waits for whom."""
