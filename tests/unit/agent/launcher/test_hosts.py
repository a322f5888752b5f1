"""The hosts of a launch, and what the launcher says about wrong arguments."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Literal

import pytest

from torchelastic.errors import SettingsError
from torchelastic.launcher import Launcher, LaunchResult, launch
from torchelastic.launcher.hosts import Host, resolve

if TYPE_CHECKING:
    from pathlib import Path

ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_ON_NODE": "4"}


@pytest.mark.parametrize(
    ("hostnames", "workers", "hosts"),
    [
        ("auto", "auto", [Host("localhost", "auto")]),
        (["one", "two"], 8, [Host("one", 8), Host("two", 8)]),
        (("one", "two"), [1, 2], [Host("one", 1), Host("two", 2)]),
        (["one"], "gpu", [Host("one", "gpu")]),
    ],
)
def test_hosts_and_their_workers(hostnames: Any, workers: Any, hosts: list[Host]) -> None:
    assert resolve(hostnames, workers, {}) == hosts


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 4),
        ({"SLURM_CPUS_ON_NODE": "", "SLURM_JOB_CPUS_PER_NODE": "72(x2)"}, 72),
        ({"SLURM_GPUS_PER_NODE": "a100:2"}, 2),
        ({"SLURM_JOB_GPUS": "0,1,2", "SLURM_GPUS_PER_NODE": "2"}, 3),
    ],
)
@pytest.mark.parametrize("hostnames", ["auto", "slurm"])
@pytest.mark.parametrize("start", ["ssh", "srun"])
def test_an_allocation_of_slurm_has_hosts_and_workers(
    start: Literal["ssh", "srun"],
    hostnames: str,
    variables: dict[str, str],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (scontrol := tmp_path / "scontrol").write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && echo node1 node2\n'
    )
    scontrol.chmod(0o755)
    if start == "srun":
        (tmp_path / "srun").symlink_to(scontrol)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environ = {**ALLOCATION, **variables}
    assert resolve(hostnames, "auto", environ) == [Host(name, count, start) for name in ("node1", "node2")]
    assert resolve(hostnames, 1, {**environ, "SLURMD_NODENAME": "node2"})[1] == Host("node2", 1, "local")
    assert resolve(["other", "node2"], "slurm", environ) == [Host("other", count), Host("node2", count, start)]


@pytest.mark.parametrize("which", ["hostnames", "workers_per_host"])
def test_slurm_without_an_allocation_is_an_error(which: str) -> None:
    with pytest.raises(RuntimeError, match=r"^There is no SLURM allocation: "):
        launch(print, **{which: "slurm"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"func": 3}, "func is 3, which is not a function."),
        ({"hostnames": "node1"}, "hostnames is 'node1': it must be"),
        ({"hostnames": []}, "hostnames is empty: "),
        ({"hostnames": ["a", 3]}, "hostnames contains 3, which is not"),
        ({"hostnames": ["-oProxyCommand=id"]}, "hostnames contains '-oProxyCommand=id', which is not"),
        ({"hostnames": ["a", "b", "a"]}, "hostnames contains a more than once: "),
        ({"hostnames": ["a", "b"], "workers_per_host": [1]}, "workers_per_host has 1 numbers for 2 hosts: "),
        ({"workers_per_host": 0}, "workers_per_host is 0: "),
        ({"workers_per_host": True}, "workers_per_host is True: "),
        ({"workers_per_host": "many"}, "workers_per_host is 'many': "),
        ({"backend": "smoke"}, "backend is 'smoke': "),
        ({"timeout": 0}, "timeout is 0: "),
        ({"agent_timeout": "1"}, "agent_timeout is '1': "),
        ({"max_restarts": -1}, "max_restarts is -1: "),
        ({"max_restarts": 1.5}, "max_restarts is 1.5: "),
        ({"timeout": math.inf}, "timeout is inf: "),
        ({"func_args": 5}, "func_args is 5: "),
        ({"func_args": "ab"}, "func_args is 'ab': "),
        ({"func_kwargs": {1: 2}}, "func_kwargs is {1: 2}: "),
        ({"workers": (3, 2)}, "workers is (3, 2): it must be (min, max) with 1 <= min <= max, a number, or None."),
        ({"code": 5}, "code is 5: it must be a path."),
        ({"python": ""}, "python is '': "),
        ({"default_env_vars": 5}, "default_env_vars is 5: "),
        ({"extra_env_vars": {"a=b": "c"}}, "extra_env_vars is {'a=b': 'c'}: "),
        ({"ssh_config_file": "/nothing"}, "ssh_config_file /nothing does not exist."),
        ({"env_file": 3}, "env_file is 3: "),
        ({"extra_env_vars": "PATH"}, "extra_env_vars is 'PATH': "),
        ({"code": "/nothing"}, "code is /nothing, which is not a folder."),
        ({"workers_per_host": 2, "workers": (3, 2)}, "workers is (3, 2): "),
        ({"workers": (1, 2)}, "workers needs the same number"),
        ({"log_handlers": ["auto"]}, "log_handlers must be "),
        ({"image": "train:1"}, 'image needs hostnames="kubernetes".'),
        ({"hostnames": ["a"], "keep": True}, 'keep needs hostnames="kubernetes".'),
        ({"resources": {"cpu": 1}}, 'resources needs hostnames="kubernetes".'),
    ],
)
def test_a_wrong_argument_gets_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        launch(**{"func": print, **arguments})
    assert str(caught.value).startswith(message)


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match="'workers_per_node'"):
        launch(print, workers_per_node=2)


def test_a_function_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SettingsError, match="Create open files, locks and sockets in the function itself"):
        Launcher(workers_per_host=1).run(print, threading.Lock())


def test_a_folder_for_logs_that_cannot_be_created_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHRUNX_LOG_DIR", str(tmp_path / "file/logs"))
    with pytest.raises(SettingsError, match=r"file/logs for the logs cannot be created: Not a directory\. Set "):
        launch(print, workers_per_host=1)


def test_results_are_found_by_rank_and_by_host() -> None:
    result = LaunchResult({"a": [1, 2], "b": [3]}, [1, 2, 3])
    assert [result.rank(rank) for rank in range(3)] == result.by_ranks() == [1, 2, 3]
    assert result.by_hostnames() == {"a": [1, 2], "b": [3]}
    assert result.index("a", 1) == result.index(hostname="a", rank=1) == result.index("a", local_rank=1) == 2
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="the ranks are 0 to 2"):
            result.rank(wrong)
    with pytest.raises(KeyError, match="No worker ran on c"):
        result.index("c", 0)
    with pytest.raises(IndexError, match="b has no local rank 1"):
        result.index("b", 1)
