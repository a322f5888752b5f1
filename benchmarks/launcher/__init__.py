"""The benchmark of functions that are launched from Python."""
