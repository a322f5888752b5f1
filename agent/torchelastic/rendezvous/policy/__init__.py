"""What the leader decides: pure functions of a snapshot of the run."""
