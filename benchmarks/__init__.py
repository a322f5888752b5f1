"""Benchmarks: ``python -m benchmarks.NAME --json``. Each has a folder; docs/benchmarks.md describes them."""
