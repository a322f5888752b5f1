"""A scenario of several jobs with a reproducible final state, for an operator with and without faults.

The test acts as the users, the kubelet and the agents: it scales, suspends and resumes jobs, reports pods as running or
ended, and writes the records of agents to an etcd. Each step waits until the operator has reacted to the previous step.
The final state is therefore always the same, except for random names and times.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Self

from elastic_operator.api.constants import LABEL_JOB, LABEL_ROLE, ROLE_WORKER
from elastic_operator.kubernetes.client import (
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    ELASTIC_JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
)
from tests.support.operator_namespace import Json, Objects, OperatorNamespace, holds, index_of, live
from tests.support.operator_process import TIMEOUT
from torchelastic.protocol.codec import encode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import OutcomeRecord, OutcomeState, StateRecord
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.kubernetes.client import Resource
    from tests.support.etcd import EtcdServer
    from torchelastic.store.api import Store

_OWNED_KINDS: Final = (DEPLOYMENTS, SERVICES, DISRUPTION_BUDGETS, NETWORK_POLICIES)
_KINDS: Final = (ELASTIC_JOBS, PODS, *_OWNED_KINDS)
_POD_NAME: Final = re.compile(r"\b([a-z]+-\d+)-[b-z2-9]{5}\b")
_TIMES: Final = ("startTime", "activeSince", "completionTime")


class Scenario:
    """The scenario in one namespace; within ``async with``, it observes all changes.

    Args:
        ns: the namespace, which has no jobs yet.
        etcd: the external etcd of most of the jobs.
    """

    def __init__(self, ns: OperatorNamespace, etcd: EtcdServer) -> None:
        self._ns = ns
        self._etcd = etcd
        self._stack = contextlib.AsyncExitStack()
        self._store: Store | None = None
        self._objects: dict[Resource, Objects] = {kind: {} for kind in _KINDS}
        self._listed: set[Resource] = set()
        self._changed = asyncio.Condition()
        self._finished: dict[str, int] = {}
        self._known: set[str] = set()
        self.violations: list[str] = []
        """Sentences about broken invariants, such as two live pods with the same index."""

    async def __aenter__(self) -> Self:
        self._store = await connect(self._etcd.settings)
        self._stack.push_async_callback(self._store.close)
        for kind in _KINDS:
            following = asyncio.create_task(self._follow(kind))
            self._stack.push_async_callback(_cancel, following)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def play(self) -> None:
        """Run all jobs concurrently until the last one has finished."""
        async with asyncio.TaskGroup() as group:
            for play in (self._grows, self._dies, self._rests, self._expires, self._fails, self._stores):
                group.create_task(play())

    async def end(self) -> Json:
        """Wait until the operator is idle, and return the final jobs and objects."""
        await self._until_idle()
        return self.state()

    async def ends_as(self, end: Json) -> None:
        """Wait until the jobs and their objects are as in ``end``."""
        await self._until_idle()
        try:
            async with asyncio.timeout(TIMEOUT), self._changed:
                await self._changed.wait_for(lambda: self.state() == end)
        except TimeoutError:
            raise AssertionError(f"the final state differs:\n{_differences(end, self.state())}") from None
        assert self.violations == []

    def state(self) -> Json:
        """Return the current jobs and objects, without values that differ between runs."""
        workers = [
            pod for pod in self._objects[PODS].values() if pod["metadata"]["labels"].get(LABEL_ROLE) == ROLE_WORKER
        ]
        jobs: Json = {}
        for name, job in self._objects[ELASTIC_JOBS].items():
            pods = Counter(
                f"{index_of(pod)} {pod['status'].get('phase')}{' resumed' if _resumed(pod) else ''}"
                for pod in workers
                if pod["metadata"]["labels"][LABEL_JOB] == name
            )
            jobs[name] = {
                "suspend": job["spec"].get("suspend", False),
                "replicas": job["spec"].get("replicas"),
                "status": _reproducible(job.get("status") or {}),
                "pods": dict(sorted(pods.items())),
            }
        return {"jobs": dict(sorted(jobs.items())), **{kind.kind: self._owned(kind) for kind in _OWNED_KINDS}}

    # The jobs

    async def _grows(self) -> None:
        """Grow, shrink, and succeed as the agents report."""
        name = "grows"
        job = await self._ns.apply(name, replicas=2, maxReplicas=4, etcd=self._external_etcd)
        pods = await self._ns.wait_for_pods(2, name)
        await self._report_training(job, pods, round=1)
        await self._ns.change(name, replicas=4)
        await self._report_training(job, await self._ns.wait_for_pods(4, name), round=2)
        await self._ns.change(name, replicas=1)
        left = await self._ns.wait_for_pods(1, name)
        await self._report_training(job, left, round=3)
        outcome = OutcomeRecord(state=OutcomeState.SUCCEEDED, round=3)
        await self._put(RunKeys(_uid(job)).state, StateRecord(outcome=outcome))
        for pod in left:
            await self._ns.report_ended(pod, 0)
        await self._ns.wait_for_job(lambda status: holds(status, "Finished"), name)

    async def _dies(self) -> None:
        """Lose failed and deleted pods, and continue."""
        name = "dies"
        await self._ns.apply(name, replicas=2, backoffLimit=3, etcd=self._external_etcd)
        for failures in (1, 2):
            pods = await self._ns.wait_for_pods(2, name)
            victim = min(pods)
            await self._ns.report_running(victim)
            await self._ns.report_ended(victim, 1)
            await self._ns.wait_for_job(lambda status, failures=failures: status.get("podFailures") == failures, name)  # type: ignore[misc]
        pods = await self._ns.wait_for_pods(2, name)
        gone = max(pods)
        await self._ns.api.delete(PODS, self._ns.name, gone)
        await self._until(lambda: _gone_and_replaced(self._live(name), _uid(pods[gone])))

    async def _rests(self) -> None:
        """Suspend, change and resume."""
        name = "rests"
        job = await self._ns.apply(name, replicas=2, etcd=self._external_etcd)
        pods = await self._ns.wait_for_pods(2, name)
        await self._report_training(job, pods, round=1, restarts=1)
        await self._ns.change(name, suspend=True)
        await self._ns.wait_for_pods(0, name)
        await self._delete_node_records(job, pods)
        await self._ns.wait_for_job(lambda status: holds(status, "Suspended"), name)
        await self._ns.change(name, args=["later.py"], suspend=False)
        await self._report_training(job, await self._ns.wait_for_pods(2, name), round=2, restarts=1)

    async def _expires(self) -> None:
        """Succeed, and be deleted with all objects."""
        name = "expires"
        await self._ns.apply(
            name, replicas=2, ttlSecondsAfterFinished=1, disruptionBudget=True, etcd=self._external_etcd
        )
        pods = await self._ns.wait_for_pods(2, name)
        for pod in pods:
            await self._ns.report_running(pod)
        for pod in pods:
            await self._ns.report_ended(pod, 0)
        await self._until(lambda: name not in self._objects[ELASTIC_JOBS])

    async def _fails(self) -> None:
        """Fail with the first failed pod."""
        name = "fails"
        await self._ns.apply(name, replicas=2, backoffLimit=0, cleanPodPolicy="All", etcd=self._external_etcd)
        victim, _ = sorted(await self._ns.wait_for_pods(2, name))
        await self._ns.report_running(victim)
        await self._ns.report_ended(victim, 5)
        await self._ns.wait_for_job(lambda status: holds(status, "Failed"), name)
        await self._until(lambda: name not in self._jobs_of_pods())

    async def _stores(self) -> None:
        """Use an etcd that the operator runs, until the job finishes."""
        name = "stores"
        await self._ns.apply(name, replicas=1, disruptionBudget=True)
        await self._until(lambda: all(any(name in each for each in self._objects[kind]) for kind in _OWNED_KINDS))
        (pod,) = await self._ns.wait_for_pods(1, name)
        await self._ns.report_running(pod)
        await self._ns.report_ended(pod, 0)
        await self._ns.wait_for_job(lambda status: holds(status, "Finished"), name)
        await self._until(lambda: not any(name in each for kind in _OWNED_KINDS for each in self._objects[kind]))

    # Actions of agents

    async def _report_training(self, job: Json, pods: Objects, *, round: int, restarts: int = 0) -> None:
        """Report a round of these pods' agents, and wait until the operator has read the round."""
        assert self._store is not None
        await self._ns.report_round(self._store, job, *pods, round=round, restarts=restarts)
        wanted = {"readyReplicas": len(pods), "worldSize": len(pods), "round": round, "state": "Running"}
        await self._ns.wait_for_job(lambda status: wanted.items() <= status.items(), job["metadata"]["name"])

    async def _delete_node_records(self, job: Json, pods: Objects) -> None:
        """Remove the records of these pods' agents."""
        assert self._store is not None
        for pod in pods:
            await self._store.delete_prefix(RunKeys(_uid(job)).node(f"{pod}.1"))

    async def _put(self, key: str, record: Any) -> None:
        assert self._store is not None
        await self._store.put(key, encode(record))

    @property
    def _external_etcd(self) -> Json:
        return {"endpoint": self._etcd.endpoint}

    # Observations

    async def _until_idle(self) -> None:
        """Wait until the operator is idle: create one more job, and wait until that one runs."""
        name = f"later{sum(job.startswith('later') for job in self._objects[ELASTIC_JOBS])}"
        job = await self._ns.apply(name, replicas=1, etcd=self._external_etcd)
        await self._report_training(job, await self._ns.wait_for_pods(1, name), round=1)
        await self._until(lambda: self._objects[ELASTIC_JOBS].get(name, {}).get("status", {}).get("state") == "Running")
        await self._until(lambda: [pod["status"]["phase"] for pod in self._live(name).values()] == ["Running"])
        # Jobs are reconciled concurrently, so under load the reconcile of another job may end later.
        await self._until(lambda: all(map(self._is_up_to_date, self._objects[ELASTIC_JOBS])))

    async def _until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT), self._changed:
            await self._changed.wait_for(true)

    async def _follow(self, kind: Resource) -> None:
        states = self._ns.api.states(kind, self._ns.name)
        async with contextlib.aclosing(states):
            async for state in states:
                async with self._changed:
                    self._objects[kind] = {each["metadata"]["name"]: dict(each) for each in state.values()}
                    self._check_invariants(kind)
                    self._changed.notify_all()

    def _check_invariants(self, kind: Resource) -> None:
        """Record broken invariants."""
        if kind == ELASTIC_JOBS:
            for job in self._objects[kind].values():
                if holds(job.get("status") or {}, "Finished"):
                    self._finished.setdefault(_uid(job), int(job["metadata"]["resourceVersion"]))
        if kind != PODS:
            return
        for name in self._jobs_of_pods():
            pods = self._live(name)
            indices = Counter(map(index_of, pods.values()))
            twice = sorted(index for index, count in indices.items() if count > 1)
            if twice:
                self.violations.append(f"{name} has two live pods of index {twice}: {sorted(pods)}")
            job = self._objects[ELASTIC_JOBS].get(name)
            if job is not None and len(pods) > job["spec"]["maxReplicas"]:
                self.violations.append(f"{name} has more pods than its maximum: {sorted(pods)}")
        for pod in self._objects[PODS].values():
            if _uid(pod) in self._known:
                continue
            self._known.add(_uid(pod))
            # Resource versions of one API server increase over all kinds of objects.
            for owner in pod["metadata"].get("ownerReferences", ()):
                end = self._finished.get(owner["uid"])
                if end is not None and int(pod["metadata"]["resourceVersion"]) > end:
                    self.violations.append(f"{pod['metadata']['name']} was created after its job had finished")

    def _is_up_to_date(self, name: str) -> bool:
        """Return whether a job's status is about its current spec and its current pods."""
        job = self._objects[ELASTIC_JOBS][name]
        status = job.get("status") or {}
        reported = (status.get("observedGeneration"), status.get("replicas"))
        return reported == (job["metadata"]["generation"], len(self._live(name)))

    def _owned(self, kind: Resource) -> list[str]:
        """Return the names of the objects of existing jobs; Kubernetes removes the objects of deleted jobs later."""
        jobs = {_uid(job) for job in self._objects[ELASTIC_JOBS].values()}
        return sorted(
            name
            for name, body in self._objects[kind].items()
            if jobs & {owner["uid"] for owner in body["metadata"].get("ownerReferences", ())}
        )

    def _jobs_of_pods(self) -> set[str]:
        return {pod["metadata"]["labels"].get(LABEL_JOB, "") for pod in self._objects[PODS].values()}

    def _live(self, name: str) -> Objects:
        labels = {LABEL_JOB: name, LABEL_ROLE: ROLE_WORKER}.items()
        return live(
            {key: pod for key, pod in self._objects[PODS].items() if labels <= pod["metadata"]["labels"].items()}
        )


def _reproducible(status: Json) -> Json:
    """Return a status without times and random names."""
    plain: Json = json.loads(_POD_NAME.sub(r"\1", json.dumps(status)))
    for name in _TIMES:
        if name in plain:
            plain[name] = "some time"
    plain.get("lastFailure", {}).pop("time", None)
    plain["timeBreakdown"] = "timeBreakdown" in plain
    for condition in plain.get("conditions", ()):
        condition.pop("lastTransitionTime")
    # These fields may differ if the operator was killed.
    for name in ("countedPodUIDs", "sizeGeneration"):
        plain.pop(name, None)
    return plain


def _differences(wanted: Json, found: Json) -> str:
    """Return the differences between two states, line by line."""
    both = ([*json.dumps(each, indent=1).splitlines()] for each in (wanted, found))
    return "\n".join(difflib.unified_diff(*both, "wanted", "found", n=6, lineterm=""))


def _gone_and_replaced(pods: Objects, uid: str) -> bool:
    return len(pods) == 2 and uid not in {_uid(pod) for pod in pods.values()}


def _resumed(pod: Json) -> bool:
    return any(entry["name"] == Env.RESUME for entry in pod["spec"]["containers"][0].get("env", ()))


def _uid(body: Json) -> str:
    return str(body["metadata"]["uid"])


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
