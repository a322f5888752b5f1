"""The benchmark of the operator."""
