"""Heartbeats: a worker reports that it makes progress.

A program that is not written in Python touches the file named by ``TORCHELASTIC_HEARTBEAT_FILE`` instead. The variable
is set if ``--heartbeat-timeout`` is given.
"""

from __future__ import annotations

import contextlib
import os

from torchelastic.agent_socket import HEARTBEAT_FILE, is_worker


def heartbeat() -> None:
    """Report that this worker makes progress. The call is cheap enough for every step.

    If ``--heartbeat-timeout`` is given, a worker without a heartbeat for that time counts as hung. The agent ends it
    and reports a failure with the stack of the worker.
    """
    path = os.environ.get(HEARTBEAT_FILE)
    if path and is_worker():
        with contextlib.suppress(OSError):
            os.utime(path)
