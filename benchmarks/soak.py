"""Random faults, one after the other, and after each all agents train together: ``python -m benchmarks.soak --json``.

Real agents, each with a real worker, and a real etcd. Which faults strike is chosen by a seed, so that a failure can be
looked into; when exactly they strike is not. After the last fault nothing may be there that was not there before the
first: no process, no descriptor, no temporary folder. See docs/benchmarks.md.
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

from benchmarks.beats import Beats, Missing
from benchmarks.breakable_etcd import BreakableEtcd
from benchmarks.command_line import at_least, duration, parser, run_to_end
from benchmarks.etcd import choose_etcd
from benchmarks.processes import Household
from benchmarks.report import Measurement, Report
from benchmarks.soak_faults import KINDS, missing, plan
from benchmarks.soak_field import Field
from elastic_operator.local.etcd import free_ports

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from benchmarks.soak_faults import Fault

LEASE: Final = 2.0
"""Seconds; short, so that the soak is."""

REST: Final = 6.0
"""Seconds after which agents that have begun are at rest, or almost."""

LIMIT_OF_REST: Final = 60.0
"""Seconds within which they are."""


@dataclass
class Soak:
    """What has happened so far.

    Attributes:
        seed: by which the faults were chosen.
        history: each strike and what came of it, in words.
        recovered: seconds from each strike's repair until all trained together, by what struck.
        needless: strikes after which the round changed though it should not have, or far more often than it should.
        leaked: what is there now and was not before, and how much of it.
        failed: why it ended early; empty where it did not.
    """

    seed: int
    history: list[str] = field(default_factory=list)
    recovered: dict[str, list[float]] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)
    leaked: dict[str, int] = field(default_factory=dict)
    failed: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is to be complained about."""
        return not (self.failed or self.needless or self.leaked)

    def complaint(self) -> str:
        """What is to be complained about, with all that is needed to look into it."""
        parts = [
            *([self.failed] if self.failed else []),
            *(f"restarted for nothing: {strike}" for strike in self.needless),
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
    tell: bool = False,
    logs: Path | None = None,
) -> Soak:
    """Inflict faults.

    Args:
        binary: of etcd.
        faults: how many.
        agents: how many agents there are.
        seed: chooses the faults.
        limit: seconds within which all agents train together again.
        tell: say on standard error how it goes.
        logs: a folder that gets what the agents have printed; None for nowhere.
    """
    result = Soak(seed)
    async with AsyncExitStack() as stack:
        household = await stack.enter_async_context(Household())
        beats = await stack.enter_async_context(Beats(household.folder / "beats"))
        etcd = BreakableEtcd(household, binary, free_ports(2))
        await etcd.start()
        place = Field(household, beats, etcd, agents=agents, lease=LEASE, limit=limit)
        for slot in range(agents):
            place.start(slot)
        try:
            round = (await place.together(0.0))[0].round
            await asyncio.sleep(REST)
            before = await place.inventory_at_rest(LIMIT_OF_REST)
            if tell:
                print(f"{agents} agents train. {missing()}", file=sys.stderr, flush=True)
            was_calm = True
            for number, strike in enumerate(plan(seed, faults, agents, LEASE)):
                calm = all(KINDS[fault.kind].calm for fault in strike)
                if calm and not was_calm:
                    # What was struck before may have consequences for a lease; they are not to be blamed on this.
                    round = (await place.together_for(LEASE))[0].round
                was_calm = calm
                round = await _strike(place, strike, round, result)
                if tell:
                    print(f"{number + 1}: {result.history[-1]}", file=sys.stderr, flush=True)
            result.leaked = await _leaked(place, before)
        except Missing as why:
            result.failed = f"{why}\n\n{place.state()}\n"
        finally:
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for slot in range(agents):
                    shutil.copy(place.log(slot), logs)
    return result


async def _strike(place: Field, strike: Sequence[Fault], round: int, result: Soak) -> int:
    """Inflict faults at once, and wait until all is well again; gives back the round then."""
    told = " and ".join(map(str, strike))
    result.history.append(f"{told}: not repaired")
    await asyncio.gather(*(KINDS[fault.kind].inflict(place, fault) for fault in strike))
    repaired = time.monotonic()
    result.history[-1] = f"{told}: not recovered"
    beats = await place.together(repaired)
    seconds = max(beat.at for beat in beats) - repaired
    at = time.strftime("%H:%M:%S")
    result.history[-1] = f"{at} {told}: round {round} to {beats[0].round} within {seconds:.2f} s"
    result.recovered.setdefault(" and ".join(fault.kind for fault in strike), []).append(seconds)
    if beats[0].round - round > sum(_changes(fault) for fault in strike):
        result.needless.append(result.history[-1])
    return beats[0].round


def _changes(fault: Fault) -> int:
    """How often the round may change through a fault: each agent that was hit may be lost, and join, by itself."""
    return 0 if KINDS[fault.kind].calm else 2 + 2 * len(fault.slots)


async def _leaked(place: Field, before: Counter[str]) -> dict[str, int]:
    """What there is more of than before, when all has come to rest."""
    deadline = time.monotonic() + LIMIT_OF_REST
    while (more := place.inventory() - before) and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.5)
    return dict(more)


def main() -> int:
    """Soak, and print; fails where anything is to be complained about."""
    flags = parser("soak", __doc__)
    flags.add_argument("--faults", type=at_least(1), default=200, metavar="N", help="how many (default: 200)")
    flags.add_argument("--agents", type=at_least(2), default=4, metavar="N", help="how many (default: 4)")
    flags.add_argument(
        "--seed", type=at_least(0), default=time.time_ns() % 1_000_000, metavar="N", help="default: the time"
    )
    flags.add_argument("--limit", type=duration, default=60.0, metavar="SECONDS", help="longer is never (default: 60)")
    flags.add_argument("--logs", type=Path, metavar="DIR", help="keep what the agents print in this folder")
    arguments = flags.parse_args()

    async def soaked() -> tuple[Report, Soak]:
        binary = await choose_etcd(arguments.etcd)
        settings = {name: getattr(arguments, name) for name in ("faults", "agents", "seed", "limit")}
        report = Report("soak", settings=settings | {"lease": LEASE}, etcd=binary)
        wanted = {name: settings[name] for name in ("faults", "agents", "seed", "limit")}
        return report, await soak(binary, **wanted, tell=True, logs=arguments.logs)

    report, result = run_to_end("soak", soaked())
    for name, samples in sorted(result.recovered.items()):
        report.add(Measurement(name, ours=samples, includes="from the repair until all agents train together"))
    report.tell("passed", result.passed)
    report.tell("left out", missing())
    report.tell("restarted for nothing", result.needless)
    report.tell("leaked", result.leaked)
    report.tell("history", result.history)
    report.show(as_json=arguments.json)
    if not result.passed:
        print(result.complaint(), file=sys.stderr)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
