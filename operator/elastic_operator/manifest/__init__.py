"""Reads a manifest file and checks it against the CRD."""
