"""The process that runs the etcd of a run on the host of ``--rdzv-endpoint`` until the last node of the run has left.

An agent starts this process (see :mod:`torchelastic.agent.etcd_host`). The process has its own session, so it outlives
the agent and is not interrupted by Ctrl-C. It uses a bare interpreter, and imports only the standard library.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from torchelastic.agent.workers.process_tree import set_parent_death_signal, set_title
from torchelastic.store.etcd_process import etcd_command

_READY_TIMEOUT: Final = 30.0
_FIRST_NODE_TIMEOUT: Final = 60.0
"""Seconds within which the first node must join; a node imports torch before it joins."""

_LINGER: Final = 3.0
"""Seconds for which etcd serves after the last node has left."""

_POLL_INTERVAL: Final = 0.5
_REQUEST_TIMEOUT: Final = 5.0


def main() -> None:
    """Run etcd. Arguments: the path of etcd, the prefix of the nodes' keys, the port, and the addresses to listen on.

    The process closes its output when etcd serves. If etcd cannot serve, the last line of the output is the reason.
    """
    binary, prefix, port, *addresses = sys.argv[1:]
    set_title(["torchelastic: etcd"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # stops etcd and removes its data
    urls = [f"http://{f'[{address}]' if ':' in address else address}:{port}" for address in addresses]
    with tempfile.TemporaryDirectory(prefix="torchelastic-etcd-") as folder:
        log = Path(folder) / "etcd.log"
        command = etcd_command(
            Path(binary), Path(folder) / "data", clients=urls, peer="http://127.0.0.1:0", log="stderr"
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, log.open("wb") as output:
            ready.bind("")  # the kernel chooses a name that begins with a NUL; $NOTIFY_SOCKET begins with @
            etcd = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "NOTIFY_SOCKET": f"@{ready.getsockname()[1:].decode()}"},
                preexec_fn=lambda: set_parent_death_signal(signal.SIGKILL),  # noqa: PLW1509 - this process has one thread
            )
            try:
                exited, nothing = os.pidfd_open(etcd.pid), os.open(os.devnull, os.O_WRONLY)
                if ready.fileno() in select.select([ready.fileno(), exited], [], [], _READY_TIMEOUT)[0]:
                    for stream in (1, 2):
                        os.dup2(nothing, stream)
                    _wait_for_the_end(exited, addresses[0], int(port), prefix)
                else:
                    print(_reason(log.read_text(errors="replace"))[:500] or "it is not ready")  # noqa: T201
            finally:
                etcd.kill()
                etcd.wait()


def _reason(log: str) -> str:
    """Return the last line of a log; if it is JSON, its message and error only."""
    line = log.strip().rpartition("\n")[2]
    if not line.startswith("{"):
        return line
    record = json.loads(line)
    return ": ".join(record[key] for key in ("msg", "error") if key in record)


def _wait_for_the_end(exited: int, host: str, port: int, prefix: str) -> None:
    """Return when etcd has exited, or no node has had a key for a while."""
    until = time.monotonic() + _FIRST_NODE_TIMEOUT
    while time.monotonic() < until and not select.select([exited], [], [], _POLL_INTERVAL)[0]:
        if _has_nodes(host, port, prefix):
            until = time.monotonic() + _LINGER


def _has_nodes(host: str, port: int, prefix: str) -> bool:
    """Return whether a key with this prefix exists, or etcd does not answer."""
    first, end = (base64.b64encode(key.encode()).decode() for key in (prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)))
    connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT)
    try:
        connection.request("POST", "/v3/kv/range", json.dumps({"key": first, "range_end": end, "count_only": True}))
        return "count" in json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return True
    finally:
        connection.close()
