"""Optional functions with which a training program communicates with its agent.

* :mod:`torchelastic.training.heartbeat`: reports that the worker makes progress.
* :mod:`torchelastic.training.notice`: asks for time to save before a planned change of the round, and checks whether
  the round is still current before a checkpoint is committed.
* :mod:`torchelastic.training.progress`: reports training progress with :func:`step` and :func:`checkpoint`.
* :mod:`torchelastic.training.non_retryable`: the exception that ends the run even if restarts are left.

Without an agent these functions do nothing. A worker is one process: its forked and :mod:`multiprocessing` children
send nothing to the agent; a program that it executes (for example from a shell script) takes its place.
"""
