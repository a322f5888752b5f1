"""A real SLURM on the loopback interface: a controller and nodes of its own, with a key of its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from testbed import packages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_COMMANDS = ("salloc", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


@contextlib.contextmanager
def slurm(folder: Path, *nodes: str) -> Iterator[Path]:
    """Run SLURM with these nodes, each with 2 CPUs; yield a folder for PATH with its commands."""
    root = packages.unpacked("slurm")
    [plugins] = root.glob("usr/lib/*/slurm-wlm")
    libraries = packages.environment(root)["LD_LIBRARY_PATH"]
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{libraries}:{plugins}", "SLURM_CONF": f"{folder}/slurm.conf"}
    (folder / "bin").mkdir()
    for name in _COMMANDS:
        variables = " ".join(f"{each}={environment[each]}" for each in ("LD_LIBRARY_PATH", "SLURM_CONF"))
        (folder / "bin" / name).write_text(f'#!/bin/sh\n{variables} exec {root}/usr/bin/{name} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    (folder / "key").touch(0o600)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "slurm.conf").write_text(_configuration(folder, plugins, nodes))
    files = {
        "socket": "socket",
        "key-file": "key",
        "log-file": "munge.log",
        "pid-file": "munge.pid",
        "seed-file": "seed",
    }
    munge = ["munged", "--foreground", "--force", *(f"--{option}={folder}/{file}" for option, file in files.items())]
    daemons = [
        ["slurmctld-wlm", "-D"],
        *(["slurmd-wlm", "-D", "-d", f"{root}/usr/sbin/slurmstepd-wlm", "-N", n] for n in nodes),
    ]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))
        for program, *arguments in (munge, *daemons):
            command = [root / "usr/sbin" / program, *arguments]
            process = stack.enter_context(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            stack.callback(process.kill)
            _await(folder, (folder / "socket").exists)  # the daemons need munged
        idle = [folder / "bin/sinfo", "--noheader", "--states=idle", "--Node", "--format=%N"]
        _await(folder, lambda: len(subprocess.run(idle, capture_output=True, check=False).stdout.split()) == len(nodes))
        yield folder / "bin"


def _configuration(folder: Path, plugins: Path, nodes: tuple[str, ...]) -> str:
    host, user = socket.gethostname(), pwd.getpwuid(os.geteuid()).pw_name
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(len(nodes) + 1)]
        port, *ports = (probe.getsockname()[1] for probe in probes)
    for node in nodes:
        (folder / node).mkdir()
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": port,
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/socket",
        "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
        "PluginDir": plugins,
        "StateSaveLocation": folder,
        "SlurmdSpoolDir": f"{folder}/%n",
        "SlurmctldPidFile": f"{folder}/controller.pid",
        "SlurmdPidFile": f"{folder}/%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SchedulerType": "sched/builtin",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",
        "JobAcctGatherType": "jobacct_gather/none",
    }
    lines = [
        *(f"{name}={value}" for name, value in settings.items()),
        *(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
            for node, port in zip(nodes, ports, strict=True)
        ),
        f"PartitionName=all Nodes={','.join(nodes)} Default=YES",
    ]
    return "".join(f"{line}\n" for line in lines)


def _await(folder: Path, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.05)
