from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_operator.errors import BadInput
from elastic_operator.local.name_claim import Holder, NameTaken, claim

if TYPE_CHECKING:
    from pathlib import Path

HOLDS_IT = """
import sys
from pathlib import Path
from elastic_operator.local.name_claim import Holder, claim

with claim(Path(sys.argv[1]), "digits") as name:
    name.tell(Holder(run="digits-1", pid=42, socket=sys.argv[2]))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def old_socket(tmp_path: Path) -> Path:
    path = tmp_path / "old.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


def holding(home: Path, control_socket: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDS_IT, str(home), str(control_socket)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_name_that_another_process_holds_is_refused_with_what_to_type(tmp_path: Path, old_socket: Path) -> None:
    with holding(tmp_path, old_socket) as other:
        sentence = r"run digits-1, process 42.*`elasticjob delete digits`"
        with pytest.raises(NameTaken, match=sentence) as taken, claim(tmp_path, "digits"):
            pass
        assert taken.value.holder == Holder(run="digits-1", pid=42, socket=str(old_socket))
        with claim(tmp_path, "letters"):
            pass
        other.kill()


def test_a_killed_process_leaves_its_name_free_and_its_socket_is_cleared_away(tmp_path: Path, old_socket: Path) -> None:
    with holding(tmp_path, old_socket) as other:
        other.kill()
        assert other.wait() == -signal.SIGKILL
    assert old_socket.exists()
    with claim(tmp_path, "digits"):
        assert not old_socket.exists()


def test_nothing_but_a_socket_is_ever_cleared_away(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    with holding(tmp_path, precious) as other:
        other.kill()
    with claim(tmp_path, "digits"):
        assert precious.exists()


def test_a_name_is_free_again_as_soon_as_it_is_let_go(tmp_path: Path) -> None:
    with claim(tmp_path, "digits") as first:
        first.release()
        with claim(tmp_path, "digits"), pytest.raises(NameTaken), claim(tmp_path, "digits"):
            pass
        first.tell(Holder(run="late", pid=1, socket=""))
    with claim(tmp_path, "digits"):
        pass


def test_a_home_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="ELASTICJOB_HOME"), claim(tmp_path / "file", "digits"):
        pass
