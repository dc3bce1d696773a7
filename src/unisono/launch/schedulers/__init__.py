"""Scripts and manifests by which a cluster's scheduler starts `unisono run` on its machines.

Start reading at `slurm_script.py`, then `kubernetes_manifest.py`; both are pure. `submission.py` calls sbatch.
"""
