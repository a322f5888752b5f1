"""Heartbeats: the worker says that it makes progress.

A program that is not Python touches the file named by ``TORCHELASTIC_HEARTBEAT_FILE`` instead. The variable is set if
``--heartbeat-timeout`` is given.
"""

from __future__ import annotations

import contextlib
import os

from torchelastic.training.agent_socket import HEARTBEAT_FILE, is_worker


def heartbeat() -> None:
    """Say that this worker makes progress; cheap enough for every step.

    If ``--heartbeat-timeout`` is given, a worker without a heartbeat for that time, or since its start, counts as hung.
    It is ended, which is a failure that reports where it hung.
    """
    path = os.environ.get(HEARTBEAT_FILE)
    if path and is_worker():
        with contextlib.suppress(OSError):
            os.utime(path)
