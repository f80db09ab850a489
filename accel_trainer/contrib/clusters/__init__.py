"""Jobs of other machines: the files with which SLURM and Kubernetes start the launcher."""
