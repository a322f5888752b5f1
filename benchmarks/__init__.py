"""What the project promises in numbers, measured: each module is run as ``python -m benchmarks.NAME --json``."""
