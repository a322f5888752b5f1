"""The benchmark of the metrics."""
