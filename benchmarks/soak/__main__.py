"""Inflict random faults; after each, all agents must train together again: ``python -m benchmarks.soak --json``.

Real agents with one worker each use a real etcd. A seed determines the faults, but not their exact times. After the
last fault, there must not be more processes, descriptors and temporary files than before the first fault. See
docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.soak.agents import Agents
from benchmarks.soak.faults import KINDS, Fault, missing, plan
from benchmarks.support.command_line import at_least, parser, run_to_end
from benchmarks.support.etcd import BreakableEtcd, choose_etcd
from benchmarks.support.processes import ProcessTree
from benchmarks.support.report import Measurement, Report, note
from benchmarks.support.worker_reports import Missing, WorkerReports
from elastic_operator.local.processes import free_ports

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

LEASE: Final = 2.0
"""The lease in seconds, which is short to keep the soak short."""

REST: Final = 6.0
"""Seconds before the first inventory, in which agents usually start their spare processes."""

LIMIT_OF_REST: Final = 60.0
"""Maximum seconds to wait for the agents' spare processes, and for leftovers to disappear."""


@dataclass
class Soak:
    """The results of a soak.

    Attributes:
        seed: the seed of the faults.
        history: one sentence for each strike (one or two faults at once) and its outcome.
        recovered: seconds from the repair until all trained together, by the kinds of the strike.
        needless: strikes after which the round changed more often than it should.
        leaked: the number of additional processes, descriptors and files, by name.
        failed: the reason why the soak ended early; empty if it did not.
    """

    seed: int
    history: list[str] = field(default_factory=list)
    recovered: dict[str, list[float]] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)
    leaked: dict[str, int] = field(default_factory=dict)
    failed: str = ""

    @property
    def passed(self) -> bool:
        """Whether the soak ended without a failure, a needless restart or a leak."""
        return not (self.failed or self.needless or self.leaked)

    def complaint(self) -> str:
        """Return the complaints, with the seed and the history."""
        parts = [
            *([self.failed] if self.failed else []),
            *(f"needless restart: {strike}" for strike in self.needless),
            *(f"left over: {count} more of {what}" for what, count in self.leaked.items()),
        ]
        return "\n".join([*parts, f"The seed is {self.seed}. What happened:", *self.history])


async def soak(
    binary: Path,
    *,
    faults: int,
    agents: int,
    seed: int,
    limit: float,
    logs: Path | None = None,
) -> Soak:
    """Inflict faults, and return the results.

    Args:
        binary: the etcd binary.
        faults: the number of faults.
        agents: the number of agents.
        seed: the seed of the faults.
        limit: seconds within which all agents must train together again.
        logs: a folder for the agents' logs; None to keep no logs.
    """
    result = Soak(seed)
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(ProcessTree())
        reports = await stack.enter_async_context(WorkerReports(processes.folder / "reports"))
        etcd = BreakableEtcd(processes, binary, free_ports(2))
        await etcd.start()
        group = Agents(processes, reports, etcd, count=agents, lease=LEASE, limit=limit)
        for slot in range(agents):
            group.start(slot)
        try:
            round = (await group.together(0.0))[0].round
            await asyncio.sleep(REST)
            before = await group.inventory_at_rest(LIMIT_OF_REST)
            note(f"{agents} agents train. {missing()}")
            was_calm = True
            for number, strike in enumerate(plan(seed, faults, agents, LEASE)):
                calm = all(KINDS[fault.kind].calm for fault in strike)
                if calm and not was_calm:
                    # The previous strike may change the round for another lease.
                    round = (await group.together_for(LEASE))[0].round
                was_calm = calm
                round = await _strike(group, strike, round, result)
                note(f"{number + 1}: {result.history[-1]}")
            # Ports that were offered before etcd lost its data stay open until the next round.
            await _strike(group, [Fault("worker killed", (0,), 0.0)], round, result)
            result.leaked = await _leaked(group, before)
        except Missing as why:
            result.failed = f"{why}\n\n{group.state()}\n"
        finally:
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for slot in range(agents):
                    shutil.copy(group.log(slot), logs)
    return result


async def _strike(group: Agents, strike: Sequence[Fault], round: int, result: Soak) -> int:
    """Inflict faults at once, wait until all agents train together again, and return the round."""
    strike_text = " and ".join(map(str, strike))
    result.history.append(f"{strike_text}: not repaired")
    await asyncio.gather(*(KINDS[fault.kind].inflict(group, fault) for fault in strike))
    repaired = time.monotonic()
    result.history[-1] = f"{strike_text}: not recovered"
    reports = await group.together(repaired)
    seconds = max(report.at for report in reports) - repaired
    at = time.strftime("%H:%M:%S")
    result.history[-1] = f"{at} {strike_text}: round {round} to {reports[0].round} within {seconds:.2f} s"
    result.recovered.setdefault(" and ".join(fault.kind for fault in strike), []).append(seconds)
    if reports[0].round - round > sum(_changes(fault) for fault in strike):
        result.needless.append(result.history[-1])
    return reports[0].round


def _changes(fault: Fault) -> int:
    """Return how often a fault may change the round: each agent that it hits may be lost and join separately."""
    return 0 if KINDS[fault.kind].calm else 2 + 2 * len(fault.slots)


async def _leaked(group: Agents, before: Counter[str]) -> dict[str, int]:
    """Wait until the agents are idle, and return the additional processes, descriptors and files."""
    deadline = time.monotonic() + LIMIT_OF_REST
    while (more := group.inventory() - before) and time.monotonic() < deadline:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.5)
    return dict(more)


def main() -> int:
    """Inflict the faults and print the results; fail if the soak did not pass."""
    flags = parser("soak", __doc__, limit=60.0)
    text = "number of faults (default: %(default)s)"
    flags.add_argument("--faults", type=at_least(1), default=200, metavar="N", help=text)
    text = "number of agents (default: %(default)s)"
    flags.add_argument("--agents", type=at_least(2), default=4, metavar="N", help=text)
    flags.add_argument(
        "--seed", type=at_least(0), default=time.time_ns() % 1_000_000, metavar="N", help="default: random"
    )
    flags.add_argument("--logs", type=Path, metavar="DIR", help="a folder for the agents' logs")
    arguments = flags.parse_args()

    async def soaked() -> tuple[Report, Soak]:
        binary = await choose_etcd(arguments.etcd)
        settings = {name: getattr(arguments, name) for name in ("faults", "agents", "seed", "limit")}
        report = Report("soak", settings=settings | {"lease": LEASE}, etcd=binary)
        return report, await soak(binary, **settings, logs=arguments.logs)

    report, result = run_to_end("soak", soaked())
    for name, samples in sorted(result.recovered.items()):
        report.add(Measurement(name, ours=samples, includes="from the repair until all agents train together"))
    report.add_value("passed", result.passed)
    report.add_value("left out", missing())
    report.add_value("needless restarts", result.needless)
    report.add_value("leaked", result.leaked)
    report.add_value("history", result.history)
    report.show(as_json=arguments.json)
    if not result.passed:
        note(result.complaint())
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
