"""Benchmarks: ``python -m benchmarks.NAME --json``. docs/benchmarks.md describes them."""
