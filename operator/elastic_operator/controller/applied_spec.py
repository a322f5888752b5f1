"""Which spec a job's pods are made from: the one that was applied when the job was started or resumed.

A change of the template would otherwise reach only the pods that are created after it, and two kinds of pods would
train together. The applied spec is fixed once there is a pod, or training has begun. A change of it takes effect when
the job is suspended and resumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from elastic_operator.api.constants import ConditionType
from elastic_operator.api.json_access import listing, mapping
from elastic_operator.api.spec import AppliedSpec, program_of, user_env, worker_container
from elastic_operator.api.status import JobState

if TYPE_CHECKING:
    from elastic_operator.api.spec import ElasticJobSpec
    from elastic_operator.controller.model import Job, Plan
    from elastic_operator.controller.snapshot import Snapshot

_OF_WORKER: Final = frozenset({"image", "command", "args", "env", "template"})
"""Fields whose content may stand in the template as well."""


@dataclass(frozen=True, slots=True)
class SpecInEffect:
    """The spec that applies to a job.

    Attributes:
        spec: the user's spec with the applied values.
        applied: what the status is to keep; None if nothing is applied.
        changes: the fields in which the user's spec differs from it.
        problem: why no pod can be made of it; None if one can.
        later_problem: why the user's spec could not be applied on a resumption; None if it could.
    """

    spec: ElasticJobSpec
    applied: AppliedSpec | None
    changes: tuple[str, ...] = ()
    problem: str | None = None
    later_problem: str | None = None


def spec_in_effect(snapshot: Snapshot, *, suspended: bool, unknown: bool) -> SpecInEffect:
    """The spec that applies to a job that has not finished.

    Args:
        snapshot: with the job as the user has it now.
        suspended: whether it is suspended, or resumed before its pods were gone.
        unknown: whether its store, which the applied spec names, has still to be read.
    """
    job, spec, applied = snapshot.job, snapshot.job.spec, snapshot.job.status.applied_spec
    if suspended:
        applied = applied if snapshot.unfinished or unknown else None
        return SpecInEffect(spec=spec.with_applied(applied), applied=applied, problem=job.problem)
    had_pods = bool(snapshot.gone) or job.status.size_generation > 0
    is_fixed = bool(snapshot.live) or (had_pods and not is_resumed(job))
    if applied is None or not is_fixed:
        return SpecInEffect(spec=spec, applied=None if job.problem else spec.applied, problem=job.problem)
    # What is applied was valid when it was applied; beside it, only the bounds can be wrong.
    problem = None if 1 <= spec.min_replicas <= spec.max_replicas else job.problem
    changes = changed_fields(spec, applied)
    later = job.problem if changes or problem is None else None
    return SpecInEffect(spec.with_applied(applied), applied, changes=changes, problem=problem, later_problem=later)


def must_stop_first(snapshot: Snapshot) -> bool:
    """Whether a job was resumed before it came to a stop.

    Its former pods and their store go first: new agents would take agents that leave for dead, and the store may have
    still to be read, or not be the one that the spec names now.
    """
    job = snapshot.job
    return is_resumed(job) and not snapshot.live and not job.status.holds(ConditionType.SUSPENDED)


def is_resumed(job: Job) -> bool:
    """Whether the user has just resumed the job."""
    return job.status.state is JobState.SUSPENDED and not job.spec.suspend


def changed_fields(spec: ElasticJobSpec, applied: AppliedSpec) -> tuple[str, ...]:
    """The fields that differ from the applied spec, such as ``spec.args``.

    What only moved between the template and the fields beside it is not a change.
    """
    keys = dict(zip(AppliedSpec.__struct_fields__, AppliedSpec.__struct_encode_fields__, strict=True))
    differing = {name for name in keys if getattr(applied, name) != getattr(spec, name)}
    if differing & _OF_WORKER and _worker_of(applied) == _worker_of(spec):
        differing -= _OF_WORKER
    return tuple(f"spec.{key}" for name, key in keys.items() if name in differing)


def with_applied_spec(job: Job, plan: Plan | None = None) -> Job:
    """The job with the spec that its pods and its store are made from.

    Args:
        job: as it was observed.
        plan: the plan that is carried out, whose status may apply another spec; None before there is one.
    """
    status = job.status if plan is None or plan.status is None else plan.status
    return job if status.applied_spec is None else replace(job, spec=job.spec.with_applied(status.applied_spec))


def _worker_of(spec: AppliedSpec) -> tuple[object, ...]:
    """What the template and the fields beside it say together."""
    own = worker_container(spec)
    beside = {key: value for key, value in own.items() if key not in _OF_WORKER}
    containers = [beside if each is own else each for each in listing(spec.template, "spec", "containers")]
    if containers == [{"name": own.get("name")}]:
        containers = []
    metadata = {key: value for key, value in mapping(spec.template, "metadata").items() if value is not None}
    pod = {key: value for key, value in mapping(spec.template, "spec").items() if key != "containers"}
    return spec.image or own.get("image"), program_of(spec), user_env(spec), metadata, pod, containers
