"""A job's name is held by one run at a time."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_operator.errors import BadInput
from elastic_operator.local.name_lock import Holder, NameTaken, lock_name

if TYPE_CHECKING:
    from pathlib import Path

HOLDS_IT = """
import sys
from pathlib import Path
from elastic_operator.local.name_lock import Holder, lock_name

with lock_name(Path(sys.argv[1]), "digits") as name:
    name.write(Holder(run="digits-1", pid=42, socket=sys.argv[2]))
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(home: Path, control_socket: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDS_IT, str(home), str(control_socket)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_name_that_is_held_is_refused_and_is_free_after_a_kill(tmp_path: Path) -> None:
    old = tmp_path / "old.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(old))
    with holding(tmp_path, old) as other:
        sentence = r"run digits-1, process 42.*`elasticjob delete digits`"
        with pytest.raises(NameTaken, match=sentence) as taken, lock_name(tmp_path, "digits"):
            pass
        assert taken.value.holder == Holder(run="digits-1", pid=42, socket=str(old))
        with lock_name(tmp_path, "letters"):
            pass
        other.kill()
        assert other.wait() == -signal.SIGKILL
    assert old.exists()
    with lock_name(tmp_path, "digits"):
        assert not old.exists()


def test_nothing_but_a_socket_is_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    with holding(tmp_path, precious) as other:
        other.kill()
    with lock_name(tmp_path, "digits"):
        assert precious.exists()


def test_a_name_is_free_as_soon_as_it_is_released(tmp_path: Path) -> None:
    with lock_name(tmp_path, "digits") as first:
        first.release()
        with lock_name(tmp_path, "digits"), pytest.raises(NameTaken), lock_name(tmp_path, "digits"):
            pass
        first.write(Holder(run="late", pid=1, socket=""))
    with lock_name(tmp_path, "digits"):
        pass


def test_a_home_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="ELASTICJOB_HOME"), lock_name(tmp_path / "file", "digits"):
        pass
