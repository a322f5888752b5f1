"""The older name of the launcher: ``python -m torchelastic.distributed.launch``."""
