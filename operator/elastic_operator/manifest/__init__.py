"""Reads the manifest of a job from YAML, and validates it against the CRD."""
