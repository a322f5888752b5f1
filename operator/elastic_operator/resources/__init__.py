"""The objects that the operator creates for a job: worker pods, etcd, PodGroup and PodDisruptionBudget."""
