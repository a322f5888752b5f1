"""The worker's side of its metrics: values go to the agent, in addition to the configured handlers.

When a worker imports this package, the package opens the memory region that an environment variable names. Only the
worker's process writes to it. Values from its forked and :mod:`multiprocessing` children do not reach the agent. The
next program of the same worker (for example in a shell script) continues with the values of the previous program.
"""

from __future__ import annotations

import fcntl
import functools
import os

from torchelastic.metrics.api import REGISTRY
from torchelastic.metrics.series_handler import MetricMemory, SeriesHandler
from torchelastic.protocol.worker import METRICS_FILE, is_worker

_opened: set[str] = set()


def attach() -> None:
    """Also send the values of this process to its agent; without an agent, do nothing."""
    path = os.environ.get(METRICS_FILE)
    if not path or not is_worker() or path in _opened:
        return
    try:
        handler = SeriesHandler(open_memory(path), REGISTRY.type_of)
    except (OSError, ValueError):  # another process of this worker writes to the file, or the agent has exited
        return
    _opened.add(path)
    REGISTRY.attach(handler)
    os.register_at_fork(after_in_child=functools.partial(REGISTRY.detach, handler))


def open_memory(path: str) -> MetricMemory:
    """Return the memory region at a path, for the only process that writes to it.

    Raises:
        OSError: the file cannot be opened, or another process writes to it.
        ValueError: the file is too short.
    """
    # The descriptor stays open because it holds the lock, which children do not inherit.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return MetricMemory(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
