"""From a plan to what starts it on a cluster: an sbatch script, or manifests for Kubernetes. Nothing is started."""
