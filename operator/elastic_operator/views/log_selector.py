"""Which lines of a job's logs to print."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogSelector:
    """Which lines of a job's logs to print.

    Attributes:
        rank: only this rank.
        pod: only this pod.
        agents: the agents' own logs instead of the workers'.
        round: only this round; None for the current one and, when following, the next ones.
        tail: only the last lines of each rank; None for all.
        follow: print new lines until the job has ended.
    """

    rank: int | None = None
    pod: str | None = None
    agents: bool = False
    round: int | None = None
    tail: int | None = None
    follow: bool = False

    @property
    def single_source(self) -> bool:
        """Whether all lines come from one rank or agent, so that they need no label."""
        return self.rank is not None or (self.agents and self.pod is not None)
