"""The fork server's process, with an empty package in the place of torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchelastic.agent.workers.fork_server import CONTROL

AGENT = Path(__file__).parents[2] / "agent"
SERVE = f"""
import os, sys
os.dup2(int(sys.argv[1]), {CONTROL})
from torchelastic.agent.workers.fork_server_main import main
main()
"""


@pytest.mark.parametrize("message", [{"preload": [], "search_path": ""}, {"import": "json"}, {"fork": 0}])
def test_a_request_that_the_agent_gives_up_ends_it_in_silence(tmp_path: Path, message: dict[str, Any]) -> None:
    (tmp_path / "torch").mkdir()
    for name in ("__init__.py", "distributed.py"):
        (tmp_path / "torch" / name).touch()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{AGENT}"},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        ours.send(json.dumps(message).encode())
        ours.shutdown(socket.SHUT_RDWR)
    _, said = server.communicate(timeout=60)
    assert (server.returncode, said) == (0, "")
