"""Measure how much memory an agent and its idle workers use: ``python -m benchmarks.memory --json``.

Four workers that have imported torch wait under torchelastic-run and torchrun in turn. The result is the sum of the PSS
(``/proc/PID/smaps_rollup``) of all processes. See docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.support.command_line import parser, run_to_end
from benchmarks.support.processes import ProcessTree
from benchmarks.support.report import Measurement, Report, note
from benchmarks.support.worker_reports import Missing, WorkerReport, WorkerReports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WORKERS: Final = 4
RATIO: Final = 2.5

_IDLE: Final = str(Path(__file__).with_name("worker.py"))
_ALONE: Final = ("--standalone", f"--nproc-per-node={WORKERS}", _IDLE)
_LAUNCHERS: Final[Mapping[str, Sequence[str]]] = {
    "torchelastic-run": (sys.executable, "-m", "torchelastic.run", *_ALONE),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", *_ALONE),
}
_TITLES: Final = {
    "torchelastic: watchdog": "watchdog",
    "torchelastic: fork server": "fork server",
    "torchelastic: spare process": "spare processes",
    "torchelastic: TCPStore of a round": "TCPStores",
}
_KIB_PER_MIB: Final = 1024.0


async def measure(name: str, *, settle: float, limit: float) -> dict[str, float]:
    """Start a launcher, wait for its workers, and return MiB by the kind of process.

    Raises:
        Missing: the workers did not start within the limit.
    """
    async with ProcessTree() as processes, WorkerReports(processes.folder / "reports") as reports:
        log = processes.folder / "log"
        agent = processes.start(_LAUNCHERS[name], log, reports.worker_environment("a", timeout=0))

        def all_workers() -> Sequence[WorkerReport] | None:
            return reports.received if len(reports.received) == WORKERS else None

        try:
            received = await reports.until(all_workers, limit=limit, agents=[agent])
        except Missing as why:
            raise Missing(f"{name}: {why}\n{log.read_text(errors='replace')[-2000:]}") from None
        await asyncio.sleep(settle)
        workers = {report.pid for report in received}
        found: dict[str, float] = {}
        for pid in processes.living([agent.pid]):
            kind = "agent" if pid == agent.pid else "workers" if pid in workers else _kind(pid)
            found[kind] = found.get(kind, 0.0) + _pss(pid)
        return dict(sorted(found.items()))


def _kind(pid: int) -> str:
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        return _TITLES.get(title, "others")
    return "others"


def _pss(pid: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / _KIB_PER_MIB
    return 0.0  # the process has exited


async def compare(*, repeat: int, settle: float, limit: float) -> Report:
    """Measure both launchers in turn."""
    report = Report("memory", settings={"repeat": repeat, "settle": settle, "workers": WORKERS})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _LAUNCHERS}
    for number in range(repeat):
        for name, samples in found.items():
            samples.append(await measure(name, settle=settle, limit=limit))
            total = sum(samples[-1].values())
            note(f"{number + 1}/{repeat}: {name}: {total:.0f} MiB")
    ours, baseline = found.values()
    report.add(
        Measurement(
            f"PSS of an agent and {WORKERS} workers",
            ours=[sum(each.values()) for each in ours],
            baseline=[sum(each.values()) for each in baseline],
            unit="MiB",
            includes="all processes, before the workers allocate anything; torchelastic-run also has spare processes, "
            "a fork server, a watchdog and the process of the round's TCPStore",
            ratio_at_least=RATIO,
        )
    )
    report.add_value(
        "MiB by kind of process (medians)",
        [
            {"system": name, "kind": kind, "MiB": statistics.median(each.get(kind, 0.0) for each in samples)}
            for name, samples in found.items()
            for kind in sorted({kind for each in samples for kind in each})
        ],
    )
    return report


def main() -> int:
    """Measure and print."""
    arguments = parser("memory", __doc__, etcd=False, repeat=5, settle=10.0, limit=120.0).parse_args()
    work = compare(repeat=arguments.repeat, settle=arguments.settle, limit=arguments.limit)
    try:
        report = run_to_end("memory", work)
    except Missing as why:
        note(f"benchmarks.memory: {why}")
        return 1
    report.show(as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
