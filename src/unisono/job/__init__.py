"""Where a process stands in its job, and how ranks come together: placement, hosts, rendezvous, process groups."""
