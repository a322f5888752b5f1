"""The panel of both dashboards that shows how long recoveries take."""

from __future__ import annotations

from typing import Final

from scripts.monitoring.dashboard import Display, Look, Panel, Query, Unit
from scripts.monitoring.promql import quantile_of_all

WORKER_RESTART: Final = "torchelastic_worker_restart_duration_seconds"
_RECOVERY: Final = "torchelastic_recovery_duration_seconds"


def time_to_recover(jobs: str) -> Panel:
    """Return the panel for the jobs that these matchers select."""
    rows = (
        (0.5, _RECOVERY, "{{cause}}, median"),
        (0.95, _RECOVERY, "{{cause}}, 95 %"),
        (0.5, WORKER_RESTART, "{{cause}}, agents' share, median"),
    )
    return Display("Time to recover", Unit.SECONDS, Look.BARS).show(
        "The time from a failure or change until the first training step of a node's new workers, by cause: "
        "the median and the 95th percentile of all nodes in the time shown. The agents' share ends when the "
        "workers have started.",
        *(Query(quantile_of_all(share, histogram, jobs=jobs, by="cause"), legend) for share, histogram, legend in rows),
    )
