"""`unisono hosts check`: what the hosts of a job are, and what the network between them does.

Start reading at `check.py`.
"""
