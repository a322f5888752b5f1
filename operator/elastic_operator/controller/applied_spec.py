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
from elastic_operator.api.spec import AppliedSpec
from elastic_operator.api.status import JobState
from elastic_operator.api.template import program_of, user_env, worker_container
from elastic_operator.api.validation import problem_of

if TYPE_CHECKING:
    from elastic_operator.api.spec import ElasticJobSpec
    from elastic_operator.controller.model import Job, Plan
    from elastic_operator.controller.pods import PodSets

_OF_WORKER: Final = frozenset({"image", "command", "args", "env", "template"})
"""Fields whose content may stand in the template as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


def spec_in_effect(job: Job, pods: PodSets, *, suspended: bool, unknown: bool) -> SpecInEffect:
    """The spec that applies to a job that has not finished.

    Args:
        job: as the user has it now.
        pods: its pods.
        suspended: whether it is suspended, or resumed before its pods were gone.
        unknown: whether its store, which the applied spec names, has still to be read.
    """
    applied = job.status.applied_spec
    if suspended:
        kept = applied if pods.unfinished or unknown else None
        return SpecInEffect(spec=job.spec.with_applied(kept), applied=kept, problem=problem_of(job.spec))
    if applied is None or not _is_fixed(job, pods):
        problem = problem_of(job.spec)
        return SpecInEffect(spec=job.spec, applied=None if problem else job.spec.applied, problem=problem)
    spec = job.spec.with_applied(applied)
    changes = changed_fields(job.spec, applied)
    problem = problem_of(spec)
    later = problem_of(job.spec) if changes or problem is None else None
    return SpecInEffect(spec=spec, applied=applied, changes=changes, problem=problem, later_problem=later)


def must_stop_first(job: Job, pods: PodSets) -> bool:
    """Whether a job was resumed before it came to a stop.

    Its former pods and their store go first: new agents would take agents that leave for dead, and the store may have
    still to be read, or not be the one that the spec names now.
    """
    return is_resumed(job) and not pods.live and not job.status.holds(ConditionType.SUSPENDED)


def is_resumed(job: Job) -> bool:
    """Whether the user has just resumed the job."""
    return job.status.state is JobState.SUSPENDED and not job.spec.suspend


def changed_fields(spec: ElasticJobSpec, applied: AppliedSpec | None) -> tuple[str, ...]:
    """The fields that differ from the applied spec, such as ``spec.args``.

    What only moved between the template and the fields beside it is not a change.
    """
    held = spec.with_applied(applied)
    keys = dict(zip(AppliedSpec.__struct_fields__, AppliedSpec.__struct_encode_fields__, strict=True))
    differing = {name for name in keys if getattr(held, name) != getattr(spec, name)}
    if differing & _OF_WORKER and _worker_of(held) == _worker_of(spec):
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


def _is_fixed(job: Job, pods: PodSets) -> bool:
    if is_resumed(job):
        return bool(pods.live)
    return bool(pods.live or pods.gone) or job.status.size_generation > 0


def _worker_of(spec: ElasticJobSpec) -> tuple[object, ...]:
    """What the template and the fields beside it say together."""
    own = worker_container(spec)
    beside = {key: value for key, value in own.items() if key not in _OF_WORKER}
    containers = [beside if each is own else each for each in listing(spec.template, "spec", "containers")]
    if containers == [{"name": own.get("name")}]:
        containers = []
    metadata = {key: value for key, value in mapping(spec.template, "metadata").items() if value is not None}
    pod = {key: value for key, value in mapping(spec.template, "spec").items() if key != "containers"}
    return spec.image or own.get("image"), program_of(spec), user_env(spec), metadata, pod, containers
