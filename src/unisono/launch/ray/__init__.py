"""Jobs on a Ray cluster: Ray places the ranks, and a launcher on each node with ranks starts them.

Start reading at `ray_job.py`, which runs where the user is; `node_launcher.py` runs on the nodes. `node_shares.py` and
`merged_output.py` are pure. Ray is imported when a job needs it.
"""
