"""The leader's decisions: pure functions of a snapshot of the run."""
