"""The command line and the environment of the agent, as frozen settings."""
