"""A small cluster in memory: what is true, what an observer may see of it, and what no plan may do to it.

Pods that start, die in all ways, linger, are evicted and deleted; nodes that fall silent; agents that form rounds and
end the run; a store that cannot be read or loses its keys; an API server that refuses what the spec asks for, or has no
room for it. The model-based tests of the plan drive it.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import FailureAction
from elastic_operator.api.status import JobState
from elastic_operator.controller.failures import pod_end
from elastic_operator.controller.model import (
    EtcdState,
    Job,
    Observed,
    Plan,
    Pod,
    PodEnd,
    PodPhase,
    TerminationCause,
    with_applied_spec,
)
from tests.support.builders import NOW, a_round, failure, says, success, with_spec
from torchelastic.protocol import ExitCode, OutcomeRecord, OutcomeState, RoundRecord, SizeRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.api.report import Report
    from elastic_operator.api.spec import ElasticJobSpec, FailureRule
    from elastic_operator.api.status import JobStatus
    from elastic_operator.controller.model import NewPod, Removal

NODES: Final = ("node-0", "node-1", "node-2")
BY_THE_OPERATOR: Final = (Reason.POD_FAILURES, Reason.POD_FAILURE_POLICY, Reason.DEADLINE_EXCEEDED)
"""Endings that the operator itself decides on; those count the pods that have died."""


class OperatorKilledError(Exception):
    """The operator died between two writes."""


class NotTakenError(Exception):
    """The API server did not take a pod."""


class ConflictError(Exception):
    """The job is not the one any more that the plan was made for."""


@dataclass
class Store:
    """The job's keys."""

    readable: bool = True
    size: SizeRecord | None = None
    round: RoundRecord | None = None
    outcome: OutcomeRecord | None = None


def is_live(pod: Pod) -> bool:
    return not pod.phase.ended and not pod.terminating


def runs(pod: Pod) -> bool:
    """Whether an agent may still be there: not where the node is lost."""
    return not pod.phase.ended and not (pod.terminating and pod.termination_cause is TerminationCause.NODE_LOST)


def finish_reason(status: JobStatus) -> str:
    """Why the job has finished; empty where it has not."""
    reasons = [each.reason for each in status.conditions if each.type == ConditionType.FINISHED and each.status]
    return reasons[0] if reasons else ""


def rule_for(pod: Pod, rules: tuple[FailureRule, ...]) -> FailureRule | None:
    """The first rule that fits a pod that has not ended well."""
    for rule in rules:
        condition_fits = any(pod.conditions.get(each.type) == each.status for each in rule.pod_conditions)
        if condition_fits or rule.pod_reasons & pod.reasons:
            return rule
    return None


def is_charged(pod: Pod, rules: tuple[FailureRule, ...]) -> bool:
    """Whether the end of a pod that has not ended well costs anything, said in another way than the plan does."""
    died = pod_end(pod) is PodEnd.FAILED
    if died or pod_end(pod) is PodEnd.DISRUPTED or (pod.termination_cause is not None and pod_end(pod) is PodEnd.LEFT):
        rule = rule_for(pod, rules)
        return died if rule is None else rule.action is not FailureAction.IGNORE
    return died


class SimulatedCluster:
    """What is true, what an observer may see of it, and what the plan promised."""

    def __init__(self, job: Job) -> None:
        self.now = NOW
        self.job = job
        self.pods: dict[str, Pod] = {}
        self.store = Store()
        self.etcd = False
        self.group: int | None = None
        self.guard: int | None = None
        self.report: Report | None = None
        self.deleted = False
        self.run_ended: OutcomeState | None = None
        self.endings: set[OutcomeState] = set()
        self.made_from: dict[str, ElasticJobSpec] = {}
        self.known_round: dict[str, int] = {}
        self.last_words_on_rounds = 0
        self.refused_input = False
        self.no_agent = False
        self.refuses = False
        self.full = False
        self.refusal: tuple[int, str] | None = None
        self.blocked: str | None = None
        self.deaths_seen: set[str] = set()
        self.past_seen: set[str] = set()
        self.sent_away: set[str] = set()
        self.seen: list[tuple[Job, Observed]] = []
        self._uids = itertools.count()
        self.look()

    # -- what can be seen

    def look(self) -> None:
        """Remember how the world looks now: an observer may still see this later on."""
        store = self.store
        readable = store.readable and self.etcd
        observed = Observed(
            pods=tuple(self.pods.values()),
            etcd=EtcdState.READY if self.etcd else EtcdState.ABSENT,
            store_read=readable,
            round=store.round if readable else None,
            outcome=store.outcome if readable else None,
            size=store.size if readable else None,
            rejected=self.refusal[1] if self.refusal is not None and self.refusal[0] == self.job.generation else None,
            blocked=self.blocked,
        )
        self.seen.append((self.job, observed))

    def observe(self, lateness: int = 0) -> tuple[Job, Observed]:
        """The world as it was some changes ago, but not before what was seen or written last."""
        index = max(len(self.seen) - 1 - lateness, 0)
        del self.seen[:index]
        return self.seen[0]

    # -- carrying out a plan

    def apply(self, job: Job, observed: Observed, todo: Plan, writes: int = 1_000_000) -> None:
        """Carry out the plan.

        Args:
            job: what the plan was made for.
            observed: likewise.
            todo: the plan.
            writes: after so many of them the operator is killed.

        Raises:
            ConflictError: the job is another by now; nothing was done.
            OperatorKilledError: after some of the writes.
        """
        changes_the_job = todo.replicas is not None or todo.status is not None
        if changes_the_job and (job.generation, job.status) != (self.job.generation, self.job.status):
            raise ConflictError
        assert len({removal.uid for removal in todo.remove}) == len(todo.remove), "a pod is removed twice"
        steps: list[Callable[[], None]] = [
            lambda: self._keep_report(todo),
            lambda: self._write_replicas(todo.replicas),
            lambda: self._write_status(job, observed, todo),
            lambda: self._keep_etcd(todo),
            lambda: self._keep_together(todo),
            lambda: self._write_size(todo.size),
            *(partial(self._remove, removal) for removal in todo.remove),
            *(partial(self._create, job, observed, todo, new) for new in todo.create),
            lambda: self._delete_job(todo),
        ]
        with contextlib.suppress(NotTakenError):
            for step in steps[:writes]:
                step()
        if writes < len(steps):
            raise OperatorKilledError
        self.look()
        self.seen = self.seen[-1:]  # what it wrote itself, the operator sees

    def forget(self) -> None:
        """Another operator begins, which has not asked the API server for anything yet."""
        self.refusal = self.blocked = None

    def _keep_report(self, todo: Plan) -> None:
        self.report = todo.report or self.report

    def _write_replicas(self, replicas: int | None) -> None:
        if replicas is not None:
            spec = msgspec.structs.replace(self.job.spec, replicas=replicas)
            self.job = with_spec(self.job, spec, generation=self.job.generation + 1)

    def _write_status(self, job: Job, observed: Observed, todo: Plan) -> None:
        if todo.status is not None:
            self._check_charges(job, observed, todo, todo.status)
            self._check_ending(job, todo.status)
            self.job = replace(self.job, status=todo.status)
            if todo.status.state is JobState.SUSPENDED:
                self.last_words_on_rounds = todo.status.round

    def _keep_etcd(self, todo: Plan) -> None:
        if self.etcd and not todo.etcd:
            self.store = Store(readable=self.store.readable)
            heard = self.run_ended is None or self.job.status.state.finished or self.job.deleting
            assert heard, "a store goes before anybody has read in it that the run has ended"
            if self.job.status.state.finished and not todo.delete_job and not self.job.deleting:
                assert self.report is not None, "a store goes before what is known of the run was kept"
                assert (self.report.state, self.report.time_breakdown) == (
                    self.job.status.state,
                    self.job.status.time_breakdown,
                )
        self.etcd = todo.etcd

    def _keep_together(self, todo: Plan) -> None:
        over = self.job.status.state.finished or self.job.status.state is JobState.SUSPENDED or self.job.deleting
        assert not over or (todo.min_member, todo.min_available) == (None, None), "something is kept for nobody"
        self.group, self.guard = todo.min_member, todo.min_available

    def _delete_job(self, todo: Plan) -> None:
        if todo.delete_job:
            spec, status = self.job.spec, self.job.status
            assert status.state.finished, "a job is removed that has not finished"
            assert status.completed is not None
            assert spec.ttl_after_finished is not None
            assert self.now >= status.completed + spec.ttl_after_finished, "a job is removed before its time"
            self.deleted = True
            self.job = replace(self.job, deleting=True)

    def _write_size(self, size: SizeRecord | None) -> None:
        if size is not None and self.store.readable:
            assert self.store.size is None or self.store.size.generation < size.generation
            self.store.size = size

    def _remove(self, removal: Removal) -> None:
        if (pod := self.pods.get(removal.uid)) is not None:
            finished = self.job.status.state.finished
            assert finished or pod.uid in self.job.status.counted_pod_uids, (
                "a pod is removed before it is accounted for"
            )
            self.delete(pod)

    def _create(self, job: Job, observed: Observed, todo: Plan, new: NewPod) -> None:
        if any(pod.name == new.name for pod in self.pods.values()):
            return
        status = self.job.status
        assert not status.state.finished, "a pod is made after the end"
        assert not job.spec.suspend, "a pod is made of a job that is suspended"
        assert status.state is not JobState.SUSPENDED, "a pod is made before it is said that the job is resumed"
        assert observed.outcome is None, "a pod is made though the run has ended"
        had_pods = job.status.size_generation > 0
        knew = observed.store_read or any(is_live(pod) for pod in observed.pods) or not had_pods
        assert knew, "a pod is made though the run may have ended"
        assert self.run_ended is None or self.etcd, "a pod is made that cannot learn that the run has ended"
        assert status.applied_spec is not None, "a pod is made before it is said of what"
        assert new.excluded == status.excluded_nodes
        assert self.group == (job.spec.min_replicas if job.spec.scheduling.gang else None), "a gang has no group"
        told = new.resume.round if new.resume is not None else 0
        assert told >= self.last_words_on_rounds, "the rounds before the suspension are forgotten"
        live = [pod for pod in self.pods.values() if is_live(pod)]
        spec = with_applied_spec(job, todo).spec
        assert all(self.made_from[pod.uid].args == spec.args for pod in live), "two kinds of pods"
        assert all(pod.index != new.index for pod in live), "two live pods in one place"
        assert len(live) < job.spec.max_replicas, "more live pods than the maximum"
        assert observed.rejected is None, "what was refused is asked for again"
        self._ask_for_room()
        uid = f"uid-{next(self._uids)}"
        made = float(int(self.now))  # no cluster counts in less than seconds
        pod = Pod(
            new.name,
            uid,
            new.index,
            PodPhase.PENDING,
            created=made,
            failures=new.failures,
            size=new.size,
            failed=new.failed,
        )
        self.pods[uid] = pod
        self.made_from[uid] = spec
        self.known_round[uid] = told

    def _ask_for_room(self) -> None:
        self.refusal = (self.job.generation, "the spec asks for what is not there") if self.refuses else None
        self.blocked = f"exceeded quota at {self.now}" if self.full and not self.refuses else None
        if self.refuses or self.full:
            raise NotTakenError

    def _check_charges(self, job: Job, observed: Observed, todo: Plan, status: JobStatus) -> None:
        reason = finish_reason(status)
        if job.status.state.finished or (reason and reason not in BY_THE_OPERATOR):
            assert status.pod_failures == job.status.pod_failures
            return
        rules = with_applied_spec(job).spec.failure_rules
        for pod in observed.pods:
            if not is_live(pod) and pod.uid not in self.past_seen:
                charged = pod.uid not in self.sent_away and is_charged(pod, rules)
                unread = observed.etcd is EtcdState.READY and not observed.store_read
                if charged and pod.phase.ended and unread:
                    continue  # the run may have ended before
                self.past_seen.add(pod.uid)
                if charged:
                    self.deaths_seen.add(pod.uid)
        self.sent_away = (self.sent_away & status.counted_pod_uids) | {removal.uid for removal in todo.remove}
        assert status.pod_failures == len(self.deaths_seen), "a charge is lost or doubled"
        if not status.state.finished:
            assert status.pod_failures <= max(job.spec.backoff_limit, job.status.pod_failures), "the budget is exceeded"

    def _check_ending(self, job: Job, status: JobStatus) -> None:
        if job.status.state.finished or not status.state.finished:
            return
        match finish_reason(status):
            case Reason.DEADLINE_EXCEEDED:
                assert not job.spec.suspend
                assert job.status.active is not None
                assert job.spec.active_deadline is not None
                assert self.now >= job.status.active + job.spec.active_deadline, "the job had more time"
            case Reason.POD_FAILURES:
                assert status.pod_failures > job.spec.backoff_limit
            case Reason.POD_FAILURE_POLICY:
                assert any(rule.action is FailureAction.FAIL_JOB for rule in with_applied_spec(job).spec.failure_rules)

    # -- what happens to pods

    def change(self, pod: Pod, **fields: object) -> None:
        self.pods[pod.uid] = replace(pod, **fields)  # type: ignore[arg-type]

    def end(self, pod: Pod, code: int | None, message: str = "", **more: object) -> None:
        phase = PodPhase.SUCCEEDED if code == 0 else PodPhase.FAILED
        words = says(message) if message else None
        self.change(pod, phase=phase, ready=False, exit_code=code, message=words, ended=float(int(self.now)), **more)

    def delete(self, pod: Pod) -> None:
        if pod.phase.ended and not pod.sidecars_running:
            del self.pods[pod.uid]
        else:
            self.change(pod, terminating=True, ready=False)

    def disrupt(self, pod: Pod, termination_cause: TerminationCause) -> None:
        """What Kubernetes does to pods that are in the way, or whose node is full, or silent."""
        if termination_cause is TerminationCause.NOT_ADMITTED:
            self.change(
                pod,
                phase=PodPhase.FAILED,
                termination_cause=termination_cause,
                reasons=frozenset({"OutOfcpu"}),
                ended=float(int(self.now)),
            )
            return
        disrupted = replace(
            pod, termination_cause=termination_cause, conditions={"DisruptionTarget": "True"}, ready=False
        )
        self.pods[pod.uid] = replace(disrupted, terminating=True)

    def evict(self, pod: Pod) -> None:
        """What a kubelet does that is short of something."""
        marks = {
            "termination_cause": TerminationCause.DISRUPTED,
            "reasons": frozenset({"Evicted"}),
            "conditions": {"DisruptionTarget": "True"},
        }
        self.end(pod, None, **marks)

    def finish_deletions(self) -> None:
        """Pods that go are gone, but for those whose node does not answer."""
        self.pods = {
            uid: pod
            for uid, pod in self.pods.items()
            if not pod.terminating or pod.termination_cause is TerminationCause.NODE_LOST
        }

    # -- what agents do

    def serving(self) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.phase is PodPhase.RUNNING and not pod.terminating]

    def agents_form_an_round(self) -> None:
        """The agents know the highest generation of those that they were started with and that of the store."""
        serving = self.serving()
        sizes = [pod.size for pod in serving if pod.size] + ([self.store.size] if self.store.size else [])
        if not (self.store.readable and self.etcd and sizes) or self.run_ended is not None:
            return
        size = max(sizes, key=lambda size: size.generation)
        members = [pod for pod in serving if pod.name not in size.draining][: size.target]
        before = self.store.round or RoundRecord(number=0)
        if len(members) >= size.min and before.nodes != tuple(f"{pod.name}.1" for pod in members):
            number = max(before.number, *(self.known_round[pod.uid] for pod in members)) + 1
            self.store.round = a_round(*members, number=number)
            self.known_round |= dict.fromkeys([pod.uid for pod in members], number)
        elif len(members) < size.min and before.members:
            self.store.round = a_round(number=before.number + 1)

    def agents_end_the_run(self, state: OutcomeState) -> None:
        round = self.store.round
        if self.run_ended is None and self.etcd and self.store.readable and round is not None and round.members:
            members = [pod for pod in self.serving() if f"{pod.name}.1" in round.nodes]
            if members:
                self.run_ended = state
                self.endings.add(state)
                self.store.outcome = success() if state is OutcomeState.SUCCEEDED else failure("no restart is left")

    def agents_hear_of_the_end(self, pod: Pod, *, sidecars_running: bool) -> None:
        if self.run_ended is OutcomeState.SUCCEEDED:
            self.end(pod, ExitCode.SUCCEEDED, sidecars_running=sidecars_running)
        elif self.run_ended is OutcomeState.FAILED:
            self.end(pod, ExitCode.FAILED, "no restart is left", sidecars_running=sidecars_running)
