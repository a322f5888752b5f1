"""What the operator tells of each job under /metrics: what stands in the job as it knows it, read when somebody looks.

Nothing is counted here, so that an operator that was started anew shows the same. The lines are written here, too: the
client library takes thirty times as long for one, and thousands of jobs have tens of thousands of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.archived import modern
from elastic_operator.kube.tally import Cause
from elastic_operator.names import ConditionType, Reason
from elastic_operator.spec import MANAGER
from elastic_operator.unchecked import integer, mapping, mappings, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elastic_operator.spec import Json

_CONDITIONS: Final = frozenset(map(str, ConditionType))
_POD_FAILED: Final = "pod_failed"
_PREFIX: Final = "elastic_operator_job_"


@dataclass(slots=True)
class _Family:
    """The series of one name, each with a value.

    Attributes:
        name: what all of them are called.
        help_text: what they tell.
        kind: gauge or counter.
        lines: of those series.
    """

    name: str
    help_text: str
    kind: str = "gauge"
    lines: list[str] = field(default_factory=list)

    def add(self, labels: str, value: int | None) -> None:
        """One series; none where its value is not known."""
        if value is not None:
            ending = "_total" if self.kind == "counter" else ""
            self.lines.append(f"{_PREFIX}{self.name}{ending}{{{labels}}} {value}\n")

    def text(self, *, open_metrics: bool) -> str:
        """All of them, with what they tell; they are called a little differently in the newer format."""
        ending = "_total" if self.kind == "counter" and not open_metrics else ""
        name = f"{_PREFIX}{self.name}{ending}"
        return f"# HELP {name} {self.help_text}\n# TYPE {name} {self.kind}\n{''.join(self.lines)}"


class JobSeries:
    """The series of all jobs.

    Args:
        bodies: gives all jobs.
    """

    def __init__(self, bodies: Callable[[], Iterable[Json]]) -> None:
        self._bodies = bodies

    def text(self, *, open_metrics: bool) -> str:
        """The lines under /metrics.

        Args:
            open_metrics: whether in that format, and not in the older one.
        """
        desired = _Family("desired_pods", "Pods that a job is to have.")
        ready = _Family("ready_pods", "Pods of a job that are ready.")
        minimum = _Family("min_pods", "Fewer pods than this never train.")
        conditions = _Family("condition", "Whether a condition holds of a job, of those that were ever said of it.")
        restarts = _Family(
            "restarts",
            "What was started anew, by cause: worker_failed (charged) and free (not) of workers, pod_failed of pods.",
            "counter",
        )
        max_restarts = _Family("max_restarts", "How many restarts because of worker_failed a job may have.")
        backoff_limit = _Family("backoff_limit", "How many restarts because of pod_failed a job may have.")
        for body in self._bodies():
            spec, status = mapping(body, "spec"), mapping(body, "status")
            if text(spec, "managedBy") not in ("", MANAGER):
                continue
            spec = modern(spec)
            job = f'job_namespace="{text(body, "metadata", "namespace")}",elasticjob="{text(body, "metadata", "name")}"'
            desired.add(job, integer(status, "desired"))
            ready.add(job, integer(status, "ready") or 0)
            minimum.add(job, integer(spec, "minReplicas"))
            for condition in mappings(status, "conditions"):
                # A store that the operator was not set up to read is not one that is away.
                if (kind := condition.get("type")) in _CONDITIONS and condition.get("reason") != Reason.NOT_ALLOWED:
                    conditions.add(f'{job},condition="{kind}"', int(condition.get("status") == "True"))
            restarts.add(f'{job},cause="{Cause.WORKER_FAILED}"', integer(status, "restarts") or 0)
            restarts.add(f'{job},cause="{Cause.FREE}"', integer(status, "freeRestarts") or 0)
            restarts.add(f'{job},cause="{_POD_FAILED}"', integer(status, "podFailures") or 0)
            most = integer(spec, "maxRestarts")
            most_pods = integer(spec, "backoffLimit")
            max_restarts.add(job, most)
            backoff_limit.add(job, most if most_pods is None else most_pods)
        families = (desired, ready, minimum, conditions, restarts, max_restarts, backoff_limit)
        return "".join(family.text(open_metrics=open_metrics) for family in families)
