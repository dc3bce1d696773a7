"""`unisono.spawn`: runs a function on several ranks, from a script, a notebook or a prompt."""
