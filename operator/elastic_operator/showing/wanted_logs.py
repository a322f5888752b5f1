"""Which logs of a job are asked for, wherever they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which logs are asked for.

    Attributes:
        rank: of this rank only.
        pod: of this pod only.
        agents: the agents' own logs, not those of the workers.
    """

    rank: int | None = None
    pod: str | None = None
    agents: bool = False

    @property
    def one_speaker(self) -> bool:
        """Whether all lines come from one place, so that it need not be said."""
        return self.rank is not None or (self.agents and self.pod is not None)
