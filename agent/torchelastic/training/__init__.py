"""What a training program uses: functions that communicate with its agent, and a sampler.

* :func:`step` and :func:`report_checkpoint` record metrics (see :mod:`torchelastic.metrics`). On rank 0 they also
  report the time of the first step and of the last checkpoint to the agent, for the time breakdown of the run. Every
  rank reports its first step, which ends a recovery.
* :func:`ask_for_notice` asks for time to save a checkpoint before a planned change of the round: before a node joins
  or leaves, or the size changes. :func:`notice` returns the notice, and :func:`answer_notice` answers it. Without a
  request, workers are stopped at once.
* :func:`is_round_current` returns whether this worker's round is still current. Call it before you commit a checkpoint.
* :class:`Checkpointer` saves the state of the training, and loads the newest checkpoint of all ranks.
* :func:`heartbeat` reports that the worker makes progress.
* :class:`NonRetryableException` ends the run even if restarts are left.
* :class:`ElasticSampler` distributes batches that are the same for any number of ranks. It does not use the agent.

Reports never block the training. A checkpoint is reported at once; of several within the next second, only the last one
is reported, at the first call after that second or at exit. A report that the agent did not accept is sent again then.

Without an agent, these functions report nothing. A worker is one process: its forked and :mod:`multiprocessing`
children send nothing to the agent, but a program that it executes (for example, from a shell script) is the worker.
"""
