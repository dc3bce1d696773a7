"""Shows what ranks do, from outside: status blocks in shared memory, stacks, and which ranks wait for which."""
