"""What a training program can tell its agent and ask of it; all of it is optional.

* :mod:`torchelastic.training.heartbeat`: the worker makes progress.
* :mod:`torchelastic.training.notice`: time to save before the round changes as planned, and whether a round still
  stands when a checkpoint is committed.
* :mod:`torchelastic.training.progress`: how far training is, by :func:`step` and :func:`checkpoint`.
* :mod:`torchelastic.training.non_retryable`: the exception that ends the run, whatever restarts are left.

Without an agent all of it does nothing. A worker is one process: what it forks, or has :mod:`multiprocessing` start,
tells the agent nothing; a program that it executes speaks for it, as one that a shell script starts.
"""
