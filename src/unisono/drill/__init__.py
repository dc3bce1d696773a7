"""A fire drill on a user's script: ranks are killed at random moments, and the result is compared with calm runs."""
