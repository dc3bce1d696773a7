"""`unisono.spawn`: a function on several ranks, called from a script, a notebook or a prompt."""
