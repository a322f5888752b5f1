"""The soak: random faults, and the recovery from each."""
