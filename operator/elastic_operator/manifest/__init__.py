"""The manifest file of a job: its YAML, and its check against the CRD."""
