"""The time until a training step."""
