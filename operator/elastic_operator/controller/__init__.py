"""Decides what to do about a job (pure) and runs the reconcile loop."""
