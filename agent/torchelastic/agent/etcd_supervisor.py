"""The process that runs the etcd of a run on the host of ``--rdzv-endpoint`` until the last node of the run has left.

An agent starts this process (see :mod:`torchelastic.agent.etcd_host`). The process has its own session, so it outlives
the agent and is not interrupted by Ctrl-C. It uses a bare interpreter, and imports only the standard library.
"""

from __future__ import annotations

import base64
import contextlib
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
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent.workers.process_tree import set_parent_death_signal, set_title
from torchelastic.errors import StartError
from torchelastic.store.etcd_process import PASSWORD_VARIABLE, etcd_command, last_message

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LOOPBACK: Final = "127.0.0.1"
_READY_TIMEOUT: Final = 30.0
_FIRST_NODE_TIMEOUT: Final = 60.0
"""Seconds within which the first node must join; a node imports torch before it joins."""

_LINGER: Final = 3.0
"""Seconds for which etcd serves after the last node has left."""

_POLL_INTERVAL: Final = 0.5
_REQUEST_TIMEOUT: Final = 5.0


def main() -> None:
    """Run etcd. Arguments: the path of etcd, the prefix of the nodes' keys, the port, and the addresses to listen on.

    With a password in :data:`~torchelastic.store.etcd_process.PASSWORD_VARIABLE`, etcd accepts only the user root.
    The process closes its output when etcd serves. If etcd cannot serve, the last line of the output is the reason.
    """
    binary, prefix, port, *addresses = sys.argv[1:]
    password = os.environ.pop(PASSWORD_VARIABLE, "")
    set_title(["torchelastic: etcd"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # stops etcd and removes its data
    with tempfile.TemporaryDirectory(prefix="torchelastic-etcd-") as folder:
        try:
            if password:  # before anyone else can reach it
                with socket.create_server((_LOOPBACK, 0)) as probe:
                    free = probe.getsockname()[1]
                with _serving(binary, Path(folder), [_LOOPBACK], free):
                    EtcdClient(_LOOPBACK, free, password).require_authentication()
            with _serving(binary, Path(folder), addresses, int(port)) as exited:
                nothing = os.open(os.devnull, os.O_WRONLY)
                for stream in (1, 2):
                    os.dup2(nothing, stream)
                _wait_for_the_end(exited, EtcdClient(addresses[0], int(port), password), prefix)
        except StartError as error:
            print(error)  # noqa: T201


@contextlib.contextmanager
def _serving(binary: str, folder: Path, addresses: Sequence[str], port: int) -> Iterator[int]:
    """Run etcd in this block, and yield a descriptor that is readable when it has exited.

    Raises:
        StartError: etcd does not serve.
    """
    urls = [f"http://{f'[{address}]' if ':' in address else address}:{port}" for address in addresses]
    log = folder / "etcd.log"
    command = etcd_command(Path(binary), folder / "data", clients=urls, log="stderr")
    command = (*command, "--bcrypt-cost=4")  # a longer hash would not protect a password of 256 bits better
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, log.open("wb") as output:
        ready.bind("")  # the kernel chooses a name that begins with a NUL; $NOTIFY_SOCKET begins with @
        etcd = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "NOTIFY_SOCKET": f"@{ready.getsockname()[1:].decode()}"},
            preexec_fn=lambda: set_parent_death_signal(signal.SIGKILL),  # noqa: PLW1509 - this process has one thread
        )
        try:
            exited = os.pidfd_open(etcd.pid)
            if ready.fileno() not in select.select([ready.fileno(), exited], [], [], _READY_TIMEOUT)[0]:
                raise StartError(last_message(log.read_text(errors="replace")) or "it is not ready")
            yield exited
        finally:
            etcd.kill()
            etcd.wait()


def _wait_for_the_end(exited: int, client: EtcdClient, prefix: str) -> None:
    """Return when etcd has exited, or no node has had a key for a while."""
    until = time.monotonic() + _FIRST_NODE_TIMEOUT
    while time.monotonic() < until and not select.select([exited], [], [], _POLL_INTERVAL)[0]:
        if client.has_keys(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)):
            until = time.monotonic() + _LINGER


class EtcdClient:
    """Sends requests to the etcd; with a password, as the user root."""

    def __init__(self, host: str, port: int, password: str) -> None:
        self._address = host, port
        self._root = {"name": "root", "password": password}
        self._token = ""

    def require_authentication(self) -> None:
        """Enable etcd's authentication, with root as the only user.

        Raises:
            StartError: it cannot be enabled, or another program of this machine has used this etcd before.
        """
        try:
            self._post("auth/role/add", {"name": "root"})
            self._post("auth/user/add", self._root)
            self._post("auth/user/grant", {"user": "root", "role": "root"})
            self._post("auth/enable", {})
            self._log_in()
            strangers = self._post("auth/user/list", {}).get("users") != ["root"] or self.has_keys("\0", "\0")
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise StartError(f"its authentication cannot be enabled: {type(error).__name__}") from None
        if strangers:
            raise StartError("another program has used this etcd before its authentication was enabled; start again")

    def has_keys(self, first: str, end: str) -> bool:
        """Return whether a key from `first` to `end` exists, or etcd does not answer; zeros select all keys."""
        start, stop = (base64.b64encode(key.encode()).decode() for key in (first, end))
        message = {"key": start, "range_end": stop, "count_only": True}
        try:
            answer = self._post("kv/range", message)
            if "error" in answer and self._token:  # the token has expired
                self._log_in()
                answer = self._post("kv/range", message)
            return "count" in answer
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return True

    def _log_in(self) -> None:
        self._token = ""
        self._token = self._post("auth/authenticate", self._root)["token"]

    def _post(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection(*self._address, timeout=_REQUEST_TIMEOUT)
        headers = {"Authorization": self._token} if self._token else {}
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(message), headers)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()
