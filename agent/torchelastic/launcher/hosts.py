"""The hosts of a launch and their numbers of workers, from the launcher's arguments and the environment of SLURM."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine, on which no ssh is needed."""

_COUNTS: Final = ("auto", "gpu", "cpu", "slurm")


@dataclass(frozen=True, slots=True)
class Host:
    """A host of a launch.

    Attributes:
        name: the name in the caller's list.
        workers: the number of workers; "auto", "gpu" or "cpu" let the host count its devices.
        start: what starts its node: a step of this SLURM allocation, ssh, or the launcher itself.
    """

    name: str
    workers: int | str
    start: Literal["local", "srun", "ssh"] = "ssh"

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine."""
        return self.start == "local" or self.name in LOCAL


def resolve(hostnames: object, workers_per_host: object, environ: Mapping[str, str]) -> list[Host]:
    """Return the hosts of a launch.

    Args:
        hostnames: "auto" for the hosts of the SLURM allocation if there is one, and otherwise for this machine; "slurm"
            for the allocation; or a list of names.
        workers_per_host: a number for all hosts, a list with a number for each, "gpu" or "cpu" for the devices of each
            host, "slurm" for the allocation's number, or "auto".
        environ: the environment of the caller, with the variables of SLURM.

    Raises:
        SettingsError: an argument is invalid; the message states what to change.
        RuntimeError: "slurm" is given, but there is no allocation.
    """
    allocation = "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ
    if "slurm" in (hostnames, workers_per_host) and not allocation:
        raise RuntimeError("There is no SLURM allocation: run this in a job of sbatch or salloc, or list the hosts.")
    slurm = hostnames == "slurm" or (hostnames == "auto" and allocation)
    if slurm:
        names = _allocated(environ)
    elif hostnames == "auto":
        names = ["localhost"]
    else:
        names = _names(hostnames)
    if workers_per_host == "slurm" or (workers_per_host == "auto" and slurm):
        workers_per_host = _workers_of_allocation(environ)
    steps = {*names} if slurm else set()
    if allocation and not slurm:
        with contextlib.suppress(SettingsError):  # without scontrol, ssh reaches the hosts that are listed
            steps = {*_allocated(environ)}
    counts = _counts(workers_per_host, len(names))
    return [Host(name, count, _start(name, steps, environ)) for name, count in zip(names, counts, strict=True)]


def _start(name: str, steps: Collection[str], environ: Mapping[str, str]) -> Literal["local", "srun", "ssh"]:
    if name not in steps:
        return "ssh"
    if name in {environ.get("SLURMD_NODENAME"), socket.gethostname().partition(".")[0]}:
        return "local"
    return "srun" if shutil.which("srun") else "ssh"


def _names(hostnames: object) -> list[str]:
    if isinstance(hostnames, str) or not isinstance(hostnames, Sequence):
        raise SettingsError(f'hostnames is {hostnames!r}: it must be "auto", "slurm" or a list of names.')
    names = [*hostnames]
    if not names:
        raise SettingsError('hostnames is empty: name at least one host, or use "auto".')
    for name in names:
        if not isinstance(name, str) or not name or name.startswith("-") or any(map(str.isspace, name)):
            raise SettingsError(f"hostnames contains {name!r}, which is not the name of a host.")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"hostnames contains {', '.join(twice)} more than once: raise workers_per_host instead.")
    return names


def _counts(workers: object, hosts: int) -> list[int | str]:
    counts: list[object] = [workers] * hosts
    if not isinstance(workers, str) and isinstance(workers, Sequence):
        counts = [*workers]
        if len(counts) != hosts:
            raise SettingsError(
                f"workers_per_host has {len(counts)} numbers for {hosts} hosts: write one for each host."
            )
    found: list[int | str] = []
    for count in counts:
        if isinstance(count, bool) or not (count in _COUNTS or (isinstance(count, int) and count >= 1)):
            raise SettingsError(
                f'workers_per_host is {count!r}: it must be "auto", "gpu", "cpu", "slurm", a number of at least 1, or '
                "a list with a number for each host."
            )
        found.append(count)
    return found


def _allocated(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of the SLURM allocation; scontrol expands the list."""
    if not (nodes := environ.get("SLURM_JOB_NODELIST")):
        raise SettingsError("SLURM_JOB_NODELIST is not set in this SLURM allocation: list the hosts.")
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)  # noqa: S607
    except (OSError, subprocess.CalledProcessError) as error:
        raise SettingsError(f"scontrol cannot list the hosts of the SLURM allocation {nodes}: {error}.") from None
    return done.stdout.split()


def _workers_of_allocation(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs of the allocation on each host, or else of CPUs."""
    if gpus := environ.get("SLURM_JOB_GPUS"):
        return len(gpus.split(","))
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE"):  # salloc sets only the last
        text = environ.get(name, "").rpartition(":")[2]  # "a100:4" has a type of GPU, "4(x2)" a number of hosts
        if (number := re.match(r"[1-9]\d*", text)) is not None:
            return int(number[0])
    raise SettingsError("The SLURM allocation names neither GPUs nor CPUs: set workers_per_host to a number.")
