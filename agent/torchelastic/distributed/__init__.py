"""Older names of launchers: ``python -m torchelastic.distributed.launch``, and :mod:`.launcher` as torch has it."""
