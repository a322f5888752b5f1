"""What holds of a job and what does not, each with its reason, for machines in a word and for people in a sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from elastic_operator.model import Condition, JobState
from elastic_operator.names import ConditionType, Reason, hostname
from elastic_operator.plan import words
from elastic_operator.status_json import rfc3339
from torchelastic.contract import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_operator.model import Job, JobStatus, Observed
    from elastic_operator.plan.ending import Ending
    from elastic_operator.plan.standing import Invalid, Scene
    from elastic_operator.plan.terms import Terms

Verdict = tuple[bool, Reason, str]
"""Whether a condition holds, why, and why in words."""

CAUSES_SHOWN: Final = 3
"""So many different reasons why pods are not ready are told."""

_ON_THEIR_WAY_OUT: Final = "the pods are on their way out"
_RESTS: Final = "no pod is made until spec.suspend is false again"
_UNKNOWN: Final = "whether the run has ended is not known while the store cannot be read"
_HELD: Final = "no pod is started until it can be read"


def conditions_of_running(
    job: Job, observed: Observed, status: JobStatus, terms: Terms, scene: Scene, now: float
) -> tuple[Condition, ...]:
    """The conditions of a job that goes on; ``status`` has all the rest."""
    hindered = observed.hindrance is not None
    out_of_reach = Reason.NOT_ALLOWED if observed.store_closed else Reason.UNREACHABLE
    waiting = _waiting(job, observed, status, scene, hindered=hindered)
    verdicts: dict[str, Verdict] = {
        ConditionType.RUNNING: _running(observed, status, waiting),
        ConditionType.WAITING: waiting,
        ConditionType.DEGRADED: _degraded(job, observed, status, scene, hindered=hindered),
    }
    # What can be said of few jobs is said of those, and taken back.
    few: dict[str, tuple[Verdict | None, Reason]] = {
        ConditionType.INVALID: (_invalid(scene.invalid), Reason.GOOD_SPEC),
        ConditionType.SUSPENDED: (None, Reason.RESUMED),
        ConditionType.CHANGES_WAITING: (_changes(terms), Reason.SPEC_IN_EFFECT),
        ConditionType.STORE_UNREACHABLE: (_said(observed.store_trouble, out_of_reach), Reason.REACHABLE),
        ConditionType.HINDERED: (_said(observed.hindrance, Reason.HINDERED), Reason.UNHINDERED),
        ConditionType.UNGUARDED: (
            _said(observed.unguarded, Reason.NO_BUDGET),
            Reason.GUARDED if job.spec.disruption_budget else Reason.NOT_ASKED_FOR,
        ),
    }
    known = {condition.type for condition in job.status.conditions}
    for kind, (holds, reason_why_not) in few.items():
        if holds is not None:
            verdicts[kind] = holds
        elif kind in known:
            verdicts[kind] = (False, reason_why_not, "")
    return _stamped(job.status, verdicts, now)


def conditions_of_resting(
    job: Job, observed: Observed, invalid: Invalid | None, now: float, *, stopping: bool, unread: bool
) -> tuple[Condition, ...]:
    """The conditions of a job that is suspended.

    Args:
        job: with the status that it had.
        observed: what was observed of it.
        invalid: why it could not be resumed as it is; None where it can.
        now: seconds since the Unix epoch.
        stopping: whether something of it still runs.
        unread: whether its store has to be read before it may go.
    """
    rests: Verdict = (False, Reason.SUSPENDED, "")
    waits: Verdict = (True, Reason.STORE_UNREADABLE, _sentence(_UNKNOWN, _why_unread(observed)))
    verdicts: dict[str, Verdict] = {
        ConditionType.RUNNING: rests,
        ConditionType.WAITING: waits if unread else rests,
        ConditionType.DEGRADED: rests,
        ConditionType.SUSPENDED: (
            (False, Reason.STOPPING, _ON_THEIR_WAY_OUT)
            if stopping
            else (False, Reason.STORE_UNREADABLE, _UNKNOWN)
            if unread
            else (True, Reason.SUSPENDED, _RESTS)
        ),
    }
    for condition in job.status.conditions:
        verdicts.setdefault(condition.type, rests)
    if (holds := _invalid(invalid)) is not None:
        verdicts[ConditionType.INVALID] = holds
    elif ConditionType.INVALID in verdicts:
        verdicts[ConditionType.INVALID] = (False, Reason.GOOD_SPEC, "")
    before = job.status
    if unread and before.state is not JobState.SUSPENDED:
        # What it waits for now, it waits for since now.
        others = tuple(condition for condition in before.conditions if condition.type != ConditionType.WAITING)
        before = replace(before, conditions=others)
    return _stamped(before, verdicts, now)


def conditions_of_the_end(before: JobStatus, ending: Ending, now: float) -> tuple[Condition, ...]:
    """The conditions of a job that has just ended."""
    over: Verdict = (False, ending.reason, "")
    ended: Verdict = (True, ending.reason, ending.message)
    succeeded = ending.state is JobState.SUCCEEDED
    verdicts: dict[str, Verdict] = {
        ConditionType.RUNNING: over,
        ConditionType.WAITING: over,
        ConditionType.DEGRADED: over,
        ConditionType.SUCCEEDED if succeeded else ConditionType.FAILED: ended,
        ConditionType.FINISHED: ended,
    }
    for condition in before.conditions:
        verdicts.setdefault(condition.type, over)
    return _stamped(before, verdicts, now)


def _waiting(job: Job, observed: Observed, status: JobStatus, scene: Scene, *, hindered: bool) -> Verdict:
    minimum = job.spec.min_replicas
    if scene.held and status.ready < minimum:
        seen = status.size_generation > 0
        unknown = _UNKNOWN if seen else "whether there were pods already, and the run has ended, only the store knows"
        sentence = _sentence(unknown, _HELD, _why_unread(observed))
        return (True, Reason.STORE_UNREADABLE, sentence)
    if status.ready < minimum:
        there = f"{status.ready} of at least {words.count(minimum, 'pod')} {'is' if status.ready == 1 else 'are'} ready"
        reason = Reason.HINDERED if hindered else Reason.BELOW_MINIMUM
        return (True, reason, _sentence(there, _missing(job, observed, scene)))
    return (False, Reason.ENOUGH_PODS, "")


def _running(observed: Observed, status: JobStatus, waiting: Verdict) -> Verdict:
    if status.state is JobState.RUNNING:
        known = f"epoch {status.epoch} with world size {status.world_size}"
        return (True, Reason.TRAINING, known if status.world_size else "enough pods are there; the rest only they know")
    waits, reason, _ = waiting
    if waits:
        return (False, Reason.NOT_STARTED if status.started is None else reason, "")
    cause = observed.epoch.cause if observed.epoch is not None and not observed.epoch.members else ""
    return (False, Reason.STARTING, cause or "the agents have not formed an epoch yet")


def _degraded(job: Job, observed: Observed, status: JobStatus, scene: Scene, *, hindered: bool) -> Verdict:
    if status.started is None:
        return (False, Reason.NOT_STARTED, "")
    if status.ready >= status.desired:
        return (False, Reason.ALL_PODS, "")
    there = f"{status.ready} of {words.count(status.desired, 'pod')} ready"
    reason = Reason.HINDERED if hindered else Reason.BELOW_DESIRED
    return (True, reason, _sentence(there, _missing(job, observed, scene)))


def _invalid(invalid: Invalid | None) -> Verdict | None:
    return None if invalid is None else (True, invalid.reason, invalid.message)


def _changes(terms: Terms) -> Verdict | None:
    if not terms.changes:
        if terms.flaw is None:
            return None
        return (
            True,
            Reason.SPEC_CHANGED,
            f"this has no effect, and the job could not be resumed with it: {terms.flaw}",
        )
    has = "has" if len(terms.changes) == 1 else "have"
    told = f"{words.listed(terms.changes)} {has} changed; suspend the job and resume it to have that take effect"
    flaw = "" if terms.flaw is None else f"as it stands, it could not be resumed: {terms.flaw}"
    return (True, Reason.SPEC_CHANGED, _sentence(told, flaw))


def _said(why: str | None, reason: Reason) -> Verdict | None:
    return None if why is None else (True, reason, words.clause(why))


def _why_unread(observed: Observed) -> str:
    """Why the store can't be read: perhaps it is the store itself that cannot be made."""
    return words.clause(observed.hindrance or observed.store_trouble or observed.etcd_trouble or "")


def _sentence(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _missing(job: Job, observed: Observed, scene: Scene) -> str:
    """For which pods the job waits, and why."""
    coming = [(pod.index, pod.name, words.clause(pod.waiting)) for pod in scene.staying if not pod.ready]
    parts = []
    if observed.hindrance is None:
        coming += [(pod.index, pod.name, "") for pod in scene.created]
    elif scene.created:
        names = words.listed([pod.name for pod in scene.created])
        parts.append(f"{names} cannot be made for now: {words.clause(observed.hindrance)}")
    parts += _not_ready(coming)
    if observed.hindrance is not None and not scene.created:
        parts.append(f"not all that the job needs can be made for now: {words.clause(observed.hindrance)}")
    if scene.backing_off:
        parts.append(
            words.listed(
                [
                    f"{hostname(job.name, place.index)} {place.story} and is started again at {rfc3339(place.due)}"
                    for place in scene.backing_off
                ]
            )
        )
    if scene.held:
        parts.append(_sentence(_UNKNOWN, _HELD, _why_unread(observed)))
    if scene.invalid is not None and scene.invalid.reason is Reason.BAD_SPEC:
        parts.append(f"no pod is made of this spec: {words.clause(scene.invalid.message)}")
    if scene.refused:
        parts.append("no more pods are made of this spec, which the cluster refuses")
    return _sentence(*parts)


def _not_ready(coming: Iterable[tuple[int, str, str]]) -> list[str]:
    """Pods that are not ready, those with one cause together: by index, with name and cause."""
    causes: dict[str, list[str]] = {}
    for _, name, cause in sorted(coming):
        causes.setdefault(cause if cause in causes or len(causes) < CAUSES_SHOWN else "", []).append(name)
    return [
        f"{words.listed(names)} {'is' if len(names) == 1 else 'are'} not ready yet: {cause}"
        if cause
        else f"{words.listed(names)} {'has' if len(names) == 1 else 'have'} not joined yet"
        for cause, names in causes.items()
    ]


def _stamped(before: JobStatus, verdicts: dict[str, Verdict], now: float) -> tuple[Condition, ...]:
    """The conditions, each with the time since which it has its value."""
    known = {condition.type: condition for condition in before.conditions}
    stamped = []
    for kind, (holds, reason, why) in verdicts.items():
        earlier = known.get(kind)
        since = earlier.since if earlier is not None and earlier.status == holds else now
        message = shorten(why, words.MESSAGE_LIMIT)
        stamped.append(Condition(type=kind, status=holds, reason=reason, message=message, since=since))
    return tuple(stamped)
