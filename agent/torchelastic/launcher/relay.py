"""Connects its standard streams with the agent in the same container: ``python -m torchelastic.launcher.relay``.

A launcher executes this program through the API server. It imports only the standard library, so that it starts fast.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

_START_TIMEOUT: Final = 60.0
"""Seconds within which the agent must have started."""

_SIZE: Final = 1 << 20


def socket_path() -> Path:
    """Return the path of the agent's socket."""
    return Path(tempfile.gettempdir()) / "torchelastic-launcher.sock"


def main() -> int:
    """Pass the data on in both directions until one side ends; return the exit code."""
    agent = socket.socket(socket.AF_UNIX)
    limit = time.monotonic() + _START_TIMEOUT
    while True:
        try:
            agent.connect(f"{socket_path()}")
        except OSError as error:
            if time.monotonic() > limit:
                print(f"the agent does not take calls: {error.strerror}", file=sys.stderr)  # noqa: T201
                return 1
            time.sleep(0.01)
        else:
            break
    threading.Thread(target=_send, args=[agent], daemon=True).start()
    while data := agent.recv(_SIZE):
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]
    return 0


def _send(agent: socket.socket) -> None:
    try:
        while data := os.read(0, _SIZE):
            agent.sendall(data)
    finally:
        os._exit(0)  # the launcher has ended, or the agent has: its connection is closed by that


if __name__ == "__main__":
    sys.exit(main())
