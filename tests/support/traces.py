"""Traces of programs on this machine: compare the results of :func:`traces` before and after a program."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Traces = dict[str, set[str]]

_CHANGES_BY_ITSELF = re.compile(
    r"fs/(dentry-state|file-nr|inode-|aio-nr|quota/)|ns_last_pid|random/|conntrack_count|/pty/nr"
)
_NETWORK = ("link", "address", "route show table all", "-6 route show table all", "rule")
_TABLES = ("iptables-nft-save", "iptables-legacy-save", "ip6tables-nft-save", "ip6tables-legacy-save")


def traces(tools: Mapping[str, str]) -> Traces:
    """The traces of each kind.

    Args:
        tools: an environment in which ``ip`` and ``iptables-save`` are on the PATH.
    """
    return {
        "mount": set(Path("/proc/self/mountinfo").read_text().splitlines()),
        "control group": {str(folder) for folder in _control_groups()},
        "value of the kernel's": set(_kernel_values()),
        **{f"ip {what}": _output(["ip", "-oneline", *what.split()], tools) for what in _NETWORK},
        **{table: _output([table], tools) for table in _TABLES},
    }


def added(before: Traces, after: Traces) -> dict[str, list[str]]:
    """The traces that were added, by kind."""
    new = {kind: sorted(after[kind] - before[kind]) for kind in before}
    return {kind: lines for kind, lines in new.items() if lines}


def processes_that_name(*words: str) -> dict[int, str]:
    """The command lines of processes whose command line, environment or control groups contain one of the words."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            files = [(process / name).read_bytes() for name in ("cmdline", "environ", "cgroup")]
            line, *others = (content.decode(errors="replace") for content in files)
            if any(word in text for word in words for text in (line, *others)):
                found[int(process.name)] = line.replace("\0", " ")
    return found


def _control_groups() -> Iterator[Path]:
    """The control groups that a node may have created, without the groups below them."""
    for folder, children, _ in os.walk("/sys/fs/cgroup"):
        ours = [name for name in children if re.search(r"elastic-operator|kubepods", name)]
        yield from (Path(folder, name) for name in ours)
        children[:] = [name for name in children if name not in ours]


def _kernel_values() -> Iterator[str]:
    for folder, _, files in os.walk("/proc/sys"):
        for path in (Path(folder, file) for file in files):
            if not _CHANGES_BY_ITSELF.search(str(path)):
                with contextlib.suppress(OSError):
                    yield f"{path}: {path.read_bytes()!r}"


def _output(command: list[str], environ: Mapping[str, str]) -> set[str]:
    text = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False).stdout
    counters = re.compile(r"\[\d+:\d+\]|expires \d+sec|(valid|preferred)_lft \S+")
    return {counters.sub("", line) for line in text.splitlines() if not line.startswith("#")}
