"""The flags and variables of ``torchelastic-run`` and of torchrun, side by side."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import WithoutSettings
from tests.support.ports import free_range

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

LAUNCHERS = ("torch.distributed.run", "torchelastic.run")
launchers = pytest.mark.parametrize("module", LAUNCHERS)

ENVIRONMENT = """
import os
names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
os.write(1, " ".join(["rank", os.environ["RANK"], *(f"{os.environ.get(name)}" for name in names)]).encode() + b"\\n")
"""
"""A program that writes its rank and the variables that depend on it."""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program ``ENVIRONMENT``."""
    (path := tmp_path / "environment.py").write_text(ENVIRONMENT)
    return path


@launchers
@pytest.mark.parametrize(
    ("environ", "flags", "ranks"),
    [
        ([], [], {"rank 0 0 None 1", "rank 1 1 None 1"}),
        (["TORCH_NCCL_ASYNC_ERROR_HANDLING=0"], [], {"rank 0 0 None 0", "rank 1 1 None 0"}),
        ([], ["--virtual-local-rank"], {"rank 0 0 0 1", "rank 1 0 1 1"}),
        (["CUDA_VISIBLE_DEVICES=4, 6"], ["--virtual-local-rank"], {"rank 0 0 4 1", "rank 1 0 6 1"}),
        ([], ["--event_log=null", "--start-m", "spawn", "--nproc_p", "2"], {"rank 0 0 None 1", "rank 1 1 None 1"}),
    ],
)
async def test_workers_have_the_same_variables(
    module: str, environ: list[str], flags: list[str], ranks: set[str], program: Path
) -> None:
    command = ["env", *environ]
    async with WithoutSettings(module, "--nproc-per-node=2", *flags, program, within=command) as launcher:
        assert await launcher.code() == 0
    assert {line for line in launcher.lines if line.startswith("rank ")} == ranks


@launchers
@pytest.mark.parametrize(
    ("environ", "flags", "reason"),
    [
        (["CUDA_VISIBLE_DEVICES=4"], ["--nproc-per-node=2", "--virtual-local-rank"], "CUDA_VISIBLE_DEVICES=4"),
        (["CUDA_VISIBLE_DEVICES="], ["--numa-binding=node"], "No accelerator available for NUMA binding"),
        ([], ["--numa-binding=near"], "'near'|--numa-binding near: must be one of"),
    ],
)
async def test_a_binding_to_a_gpu_that_does_not_exist_fails_with_the_reason(
    module: str, environ: list[str], flags: list[str], reason: str, program: Path
) -> None:
    async with WithoutSettings(module, *flags, program, within=["env", *environ]) as launcher:
        assert await launcher.code() in (1, 2)
        await launcher.wait_for_line(reason)
    assert not any(line.startswith("rank 0") for line in launcher.lines)


NUMA = """
import os, shutil
import torch.numa.binding
torch.numa.binding._get_logical_cpus_to_bind_to = lambda **_: {min(os.sched_getaffinity(0))}
shutil.which = lambda _: "/usr/bin/numactl"
"""
"""A module that lets torch find a GPU near the first CPU."""


async def test_a_worker_runs_on_the_cpus_that_torch_chooses(tmp_path: Path) -> None:
    (tmp_path / "numa.py").write_text(NUMA)
    (program := tmp_path / "cpus.py").write_text("import os; print('cpus', os.sched_getaffinity(0))")
    async with WithoutSettings("torchelastic.run", "--numa-binding=node", "--preload=numa", program) as launcher:
        assert await launcher.code() == 0
    assert f"cpus { ({min(os.sched_getaffinity(0))}) }" in launcher.lines


ROLES = """
import os
names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE")
os.write(1, " ".join(["role", *(os.environ[name] for name in names)]).encode() + b"\\n")
"""


@launchers
async def test_the_workers_of_each_role_are_counted(module: str, tmp_path: Path, etcd: EtcdServer) -> None:
    (program := tmp_path / "roles.py").write_text(ROLES)
    flags = ["--nnodes=2", f"--rdzv-id={uuid.uuid4()}", f"--rdzv-endpoint={etcd.endpoint}"]
    if module == "torch.distributed.run":
        flags[-1:] = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_range(1).first}"]
    async with (
        WithoutSettings(module, *flags, "--role=trainer", "--nproc-per-node=2", program) as trainer,
        WithoutSettings(module, *flags, "--role=evaluator", program) as evaluator,
    ):
        assert (await trainer.code(), await evaluator.code()) == (0, 0)
    assert {"role trainer 0 2 3", "role trainer 1 2 3"} <= {*trainer.lines}
    assert "role evaluator 0 1 3" in evaluator.lines


@launchers
@pytest.mark.parametrize("piped", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_program_on_standard_input_runs(module: str, workers: int, program: Path, *, piped: bool) -> None:
    command = [sys.executable, "-m", module, f"--nproc-per-node={workers}", "/dev/stdin"]
    if piped:
        done = subprocess.run(command, input=program.read_bytes(), capture_output=True, check=True)
    else:
        with program.open() as file:
            done = subprocess.run(command, stdin=file, capture_output=True, check=True)
    # Only one process can read a pipe: the program of the others is empty.
    assert done.stdout.count(b"rank ") == (1 if piped else workers)


@launchers
async def test_the_variable_python_exec_names_the_interpreter_of_the_workers(
    module: str, tmp_path: Path, program: Path
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\necho "with $*"\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    command = ["env", f"PYTHON_EXEC={interpreter}"]
    for flags in ([program], ["-m", "this"]):
        async with WithoutSettings(module, *flags, within=command) as launcher:
            assert await launcher.code() == 0
        assert f"with -u {' '.join(map(str, flags))}" in launcher.lines


@launchers
@pytest.mark.parametrize(
    "flag",
    [
        pytest.param(
            "--signals-to-handle=SIGTERM,SIGCONT",
            marks=pytest.mark.differs(
                "`--signals-to-handle` accepts SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2. torchrun accepts "
                "any signal, and ignores unknown names."
            ),
        ),
        pytest.param(
            "--event-log-handler=console",
            marks=pytest.mark.differs(
                "`--event-log-handler` accepts only `null`, because the agent records no events for torch's handlers: "
                "`--metrics-port` and the agent's log have this information."
            ),
        ),
    ],
)
async def test_signals_and_event_handlers_that_the_agent_does_not_have_are_refused(
    module: str, flag: str, program: Path
) -> None:
    async with WithoutSettings(module, flag, program) as launcher:
        assert await launcher.code() == (2 if module == "torchelastic.run" else 0)


@launchers
@pytest.mark.differs(
    "Bad flags end the agent with exit code 2. torchrun exits with 2 if it does not know the flag, and with 1 if its "
    "value is bad."
)
@pytest.mark.parametrize(
    "flag",
    [
        "--shutdown-timeout=-1",
        "--monitor-interval=-1",
        "--rdzv-conf=join_timeout=-1",
        "--rdzv-conf=last_call_timeout=-1",
        "--rdzv-conf=close_timeout=-1",
        "--rdzv-conf=heartbeat_timeout=-1",
        "--rdzv-conf=read_timeout=-1",
    ],
)
async def test_negative_times_are_refused(module: str, flag: str, program: Path) -> None:
    backend = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    async with WithoutSettings(module, *backend, flag, program) as launcher:
        assert await launcher.code() == (2 if module == "torchelastic.run" else 1)
    assert not any(line.startswith("rank") for line in launcher.lines)


@pytest.mark.differs(
    "The abbreviations `--re`, `--t`, `--te` and `--node-` are ambiguous. torchrun has fewer flags with these letters."
)
async def test_abbreviations_of_flags_mean_the_same() -> None:
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ABBREVIATIONS, stdout=asyncio.subprocess.PIPE, limit=1 << 20
    )
    differing, _ = await done.communicate()
    assert (done.returncode, differing.decode().split()) == (0, ["--re", "--t", "--te", "--node-", "--node_"])


ABBREVIATIONS = """
import argparse, contextlib, io
from torch.distributed.run import get_args_parser
from torchelastic.config import flags
from torchelastic.errors import SettingsError

parser = get_args_parser()
VALUES = {"start-method": "spawn", "numa-binding": "node", "rdzv-conf": "timeout=60", "signals-to-handle": "SIGINT"}
VALUES["event-log-handler"] = "null"

def accepted(argv):
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        return parser.parse_args(argv).training_script == "train.py"

def name_of(argv):
    with contextlib.suppress(SettingsError):
        return next(iter(flags.read(argv, {}).raw))

checked = 0
for action in parser._actions:
    for spelling in action.option_strings:
        name = spelling.lstrip("-").replace("_", "-")
        if name in ("h", "help", "print-completion"):
            continue
        values = [] if action.nargs == 0 else [VALUES.get(name, "1")]
        for end in range(3, len(spelling) + 1):
            argv = [spelling[:end], *values, "train.py"]
            if accepted(argv):
                checked += 1
                if name_of(argv) != name:
                    print(spelling[:end])
assert checked > 200
"""
