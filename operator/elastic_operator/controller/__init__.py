"""Plans the changes of a job (pure functions) and runs the reconcile loop."""
