"""Parse the agent's command line and environment into frozen dataclasses."""
