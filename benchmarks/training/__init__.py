"""The benchmark of training that continues when its world changes."""
