"""How much memory an agent takes with its workers before they allocate any: ``python -m benchmarks.memory --json``.

Four workers that have imported torch and wait, under ours and under torchrun in turn. What is counted is the PSS
(``/proc/PID/smaps_rollup``) of every process: its own pages, and its share of those that it shares. See
docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.beats import Beat, Beats, Missing
from benchmarks.command_line import at_least, duration, parser, run_to_end
from benchmarks.processes import Household
from benchmarks.report import Measurement, Report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WORKERS: Final = 4
RATIO: Final = 2.5

_IDLE: Final = str(Path(__file__).parent / "programs" / "idle.py")
_ALONE: Final = ("--standalone", f"--nproc-per-node={WORKERS}", _IDLE)
_SYSTEMS: Final[Mapping[str, Sequence[str]]] = {
    "torchelastic-run": (sys.executable, "-m", "torchelastic.run", *_ALONE),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", *_ALONE),
}
_TITLES: Final = {
    "torchelastic: watchdog": "watchdog",
    "torchelastic: fork server": "fork server",
    "torchelastic: spare process": "spare processes",
    "torchelastic: store of the round": "the round's store",
}
_MEBIBYTE: Final = 1024.0
"""kB, as /proc calls KiB, in one."""


async def measure(name: str, *, settle: float, limit: float) -> dict[str, float]:
    """Start one of the systems, let it come to rest, and count; gives back MiB by the kind of process.

    Raises:
        Missing: its workers did not come.
    """
    async with Household() as household, Beats(household.folder / "beats") as beats:
        log = household.folder / "log"
        agent = household.start(_SYSTEMS[name], log, beats.worker_environment("a", timeout=0))

        def all_there() -> Sequence[Beat] | None:
            return beats.told if len(beats.told) == WORKERS else None

        try:
            told = await beats.until(all_there, limit=limit, agents=[agent])
        except Missing as why:
            raise Missing(f"{name}: {why}\n{log.read_text(errors='replace')[-2000:]}") from None
        await asyncio.sleep(settle)
        workers = {beat.pid for beat in told}
        found: dict[str, float] = {}
        for pid in household.living([agent.pid]):
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
                return int(line.split()[1]) / _MEBIBYTE
    return 0.0  # it has just ended


async def compare(*, repeat: int, settle: float, limit: float) -> Report:
    """Measure both in turn."""
    report = Report("memory", settings={"repeat": repeat, "settle": settle, "workers": WORKERS})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _SYSTEMS}
    for number in range(repeat):
        for name, samples in found.items():
            samples.append(await measure(name, settle=settle, limit=limit))
            total = sum(samples[-1].values())
            print(f"{number + 1}/{repeat}: {name}: {total:.0f} MiB", file=sys.stderr, flush=True)
    ours, peer = found.values()
    report.add(
        Measurement(
            f"PSS of an agent and {WORKERS} workers",
            ours=[sum(each.values()) for each in ours],
            peer=[sum(each.values()) for each in peer],
            unit="MiB",
            includes="all processes, before the workers allocate anything; ours with its spare processes, the fork "
            "server, the guard and the process of the round's store",
            ratio_at_least=RATIO,
        )
    )
    report.tell(
        "MiB by kind of process (medians)",
        [
            {"system": name, "kind": kind, "MiB": statistics.median(each.get(kind, 0.0) for each in samples)}
            for name, samples in found.items()
            for kind in sorted({kind for each in samples for kind in each})
        ],
    )
    return report


def main() -> int:
    """Measure, and print."""
    flags = parser("memory", __doc__, etcd=False)
    flags.add_argument("--repeat", type=at_least(1), default=5, metavar="N", help="measure so often (default: 5)")
    flags.add_argument(
        "--settle", type=duration, default=10.0, metavar="SECONDS", help="wait before that (default: 10)"
    )
    flags.add_argument(
        "--limit", type=duration, default=120.0, metavar="SECONDS", help="longer is never (default: 120)"
    )
    arguments = flags.parse_args()
    work = compare(repeat=arguments.repeat, settle=arguments.settle, limit=arguments.limit)
    try:
        report = run_to_end("memory", work)
    except Missing as why:
        print(f"benchmarks.memory: {why}", file=sys.stderr)
        return 1
    report.show(as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
