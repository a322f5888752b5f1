"""The benchmark of starts and recoveries."""
