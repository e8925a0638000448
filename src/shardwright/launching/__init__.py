"""Job files that start a run on several machines: Slurm, Kubernetes, SkyPilot, Ray."""
