"""The lives of some jobs as one story, and how it ends: told to an operator on good days and on bad ones.

The test is the jobs' users, the kubelet and the agents: it scales, suspends and resumes, has pods run, die and end, and
writes into an etcd what agents would. Each step waits until the operator has done what follows from the one before. So
the end is the same each time, but for names, times and what is left to chance.
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
    PODS,
    SERVICES,
)
from tests.support.operator_place import Json, Objects, Place, holds, index_of, live
from tests.support.operator_process import PATIENCE
from torchelastic.protocol import (
    Env,
    OutcomeRecord,
    OutcomeState,
    RunKeys,
    StateRecord,
    encode,
)
from torchelastic.store import connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.kubernetes.client import Resource
    from tests.support.etcd import EtcdServer
    from torchelastic.store import Store

_BESIDE: Final = (DEPLOYMENTS, SERVICES, DISRUPTION_BUDGETS)
_KINDS: Final = (ELASTIC_JOBS, PODS, *_BESIDE)
_OF_PODS: Final = re.compile(r"\b([a-z]+-\d+)-[b-z2-9]{5}\b")
_TIMES: Final = ("startTime", "activeSince", "completionTime")


class Story:
    """What happens to the jobs of a namespace; within ``async with`` all changes are observed.

    Args:
        place: the namespace; empty.
        etcd: the external etcd of most of the jobs.
    """

    def __init__(self, place: Place, etcd: EtcdServer) -> None:
        self._place = place
        self._etcd = etcd
        self._stack = contextlib.AsyncExitStack()
        self._store: Store | None = None
        self._seen: dict[Resource, Objects] = {kind: {} for kind in _KINDS}
        self._listed: set[Resource] = set()
        self._news = asyncio.Condition()
        self._finished: dict[str, int] = {}
        self._known: set[str] = set()
        self.wrongs: list[str] = []
        """Sentences about broken rules, such as two live pods with the same index."""

    async def __aenter__(self) -> Self:
        self._store = await connect(self._etcd.settings)
        self._stack.push_async_callback(self._store.close)
        for kind in _KINDS:
            following = asyncio.create_task(self._follow(kind))
            self._stack.push_async_callback(_cancel, following)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def tell(self) -> None:
        """Perform all lives at once, until the last one has reached its end."""
        async with asyncio.TaskGroup() as lives:
            for life in (self._grows, self._dies, self._rests, self._expires, self._fails, self._stores):
                lives.create_task(life())

    async def end(self) -> Json:
        """The jobs and their objects when the operator has nothing left to do."""
        await self._nothing_is_left_to_do()
        return self.so_far()

    async def ends_as(self, end: Json) -> None:
        """Return when the jobs and their objects are as in ``end``."""
        await self._nothing_is_left_to_do()
        try:
            async with asyncio.timeout(PATIENCE), self._news:
                await self._news.wait_for(lambda: self.so_far() == end)
        except TimeoutError:
            raise AssertionError(f"the end differs:\n{_differences(end, self.so_far())}") from None
        assert self.wrongs == []

    def so_far(self) -> Json:
        """The present jobs and objects, without values that differ in each run."""
        workers = [pod for pod in self._seen[PODS].values() if pod["metadata"]["labels"].get(LABEL_ROLE) == ROLE_WORKER]
        jobs: Json = {}
        for name, job in self._seen[ELASTIC_JOBS].items():
            pods = Counter(
                f"{index_of(pod)} {pod['status'].get('phase')}{' resumed' if _resumed(pod) else ''}"
                for pod in workers
                if pod["metadata"]["labels"][LABEL_JOB] == name
            )
            jobs[name] = {
                "suspend": job["spec"].get("suspend", False),
                "replicas": job["spec"].get("replicas"),
                "status": _plain(job.get("status") or {}),
                "pods": dict(sorted(pods.items())),
            }
        return {"jobs": dict(sorted(jobs.items())), **{kind.kind: self._owned(kind) for kind in _BESIDE}}

    # The lives

    async def _grows(self) -> None:
        """Grows, shrinks, and succeeds as its agents report."""
        name = "grows"
        job = await self._place.apply(name, replicas=2, maxReplicas=4, etcd=self._outside)
        pods = await self._place.pods(2, name)
        await self._trains(job, pods, round=1)
        await self._place.change(name, replicas=4)
        await self._trains(job, await self._place.pods(4, name), round=2)
        await self._place.change(name, replicas=1)
        left = await self._place.pods(1, name)
        await self._trains(job, left, round=3)
        outcome = OutcomeRecord(state=OutcomeState.SUCCEEDED, round=3)
        await self._put(RunKeys.of(_uid(job)).state, StateRecord(outcome=outcome))
        for pod in left:
            await self._place.ends(pod, 0)
        await self._place.job(lambda status: holds(status, "Finished"), name)

    async def _dies(self) -> None:
        """Loses failed and deleted pods, and goes on."""
        name = "dies"
        await self._place.apply(name, replicas=2, backoffLimit=3, etcd=self._outside)
        for failures in (1, 2):
            pods = await self._place.pods(2, name)
            victim = min(pods)
            await self._place.runs(victim)
            await self._place.ends(victim, 1)
            await self._place.job(lambda status, failures=failures: status.get("podFailures") == failures, name)  # type: ignore[misc]
        pods = await self._place.pods(2, name)
        gone = max(pods)
        await self._place.api.delete(PODS, self._place.namespace, gone)
        await self._until(lambda: _gone_and_replaced(self._live(name), _uid(pods[gone])))

    async def _rests(self) -> None:
        """Is suspended, changed and resumed."""
        name = "rests"
        job = await self._place.apply(name, replicas=2, etcd=self._outside)
        pods = await self._place.pods(2, name)
        await self._trains(job, pods, round=1, restarts=1)
        await self._place.change(name, suspend=True)
        await self._place.pods(0, name)
        await self._leave(job, pods)
        await self._place.job(lambda status: holds(status, "Suspended"), name)
        await self._place.change(name, args=["later.py"], suspend=False)
        await self._trains(job, await self._place.pods(2, name), round=2, restarts=1)

    async def _expires(self) -> None:
        """Succeeds, and is removed with all its objects."""
        name = "expires"
        await self._place.apply(name, replicas=2, ttlSecondsAfterFinished=1, disruptionBudget=True, etcd=self._outside)
        pods = await self._place.pods(2, name)
        for pod in pods:
            await self._place.runs(pod)
        for pod in pods:
            await self._place.ends(pod, 0)
        await self._until(lambda: name not in self._seen[ELASTIC_JOBS])

    async def _fails(self) -> None:
        """Fails with its first failed pod."""
        name = "fails"
        await self._place.apply(name, replicas=2, backoffLimit=0, cleanPodPolicy="All", etcd=self._outside)
        victim, _ = sorted(await self._place.pods(2, name))
        await self._place.runs(victim)
        await self._place.ends(victim, 5)
        await self._place.job(lambda status: holds(status, "Failed"), name)
        await self._until(lambda: name not in self._jobs_of_pods())

    async def _stores(self) -> None:
        """Has an etcd of its own until its end."""
        name = "stores"
        await self._place.apply(name, replicas=1, disruptionBudget=True)
        await self._until(lambda: all(any(name in each for each in self._seen[kind]) for kind in _BESIDE))
        (pod,) = await self._place.pods(1, name)
        await self._place.runs(pod)
        await self._place.ends(pod, 0)
        await self._place.job(lambda status: holds(status, "Finished"), name)
        await self._until(lambda: not any(name in each for kind in _BESIDE for each in self._seen[kind]))

    # What agents do

    async def _trains(self, job: Json, pods: Objects, *, round: int, restarts: int = 0) -> None:
        """Have these pods' agents agree on a round, and wait until the operator has seen that."""
        assert self._store is not None
        await self._place.train(self._store, job, *pods, round=round, restarts=restarts)
        wanted = {"readyReplicas": len(pods), "worldSize": len(pods), "round": round, "state": "Running"}
        await self._place.job(lambda status: wanted.items() <= status.items(), job["metadata"]["name"])

    async def _leave(self, job: Json, pods: Objects) -> None:
        """Remove the records of these pods' agents."""
        assert self._store is not None
        for pod in pods:
            await self._store.delete_prefix(RunKeys.of(_uid(job)).node(f"{pod}.1"))

    async def _put(self, key: str, record: Any) -> None:
        assert self._store is not None
        await self._store.put(key, encode(record))

    @property
    def _outside(self) -> Json:
        return {"endpoint": self._etcd.endpoint}

    # What is seen

    async def _nothing_is_left_to_do(self) -> None:
        """Wait until the operator has finished its work: it then handles one more job completely."""
        name = f"later{sum(job.startswith('later') for job in self._seen[ELASTIC_JOBS])}"
        job = await self._place.apply(name, replicas=1, etcd=self._outside)
        await self._trains(job, await self._place.pods(1, name), round=1)
        await self._until(lambda: self._seen[ELASTIC_JOBS].get(name, {}).get("status", {}).get("state") == "Running")
        await self._until(lambda: [pod["status"]["phase"] for pod in self._live(name).values()] == ["Running"])
        # Jobs are reconciled concurrently, so under load another job may be finished later.
        await self._until(lambda: all(map(self._is_told, self._seen[ELASTIC_JOBS])))

    async def _until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(true)

    async def _follow(self, kind: Resource) -> None:
        states = self._place.api.states(kind, self._place.namespace)
        async with contextlib.aclosing(states):
            async for state in states:
                async with self._news:
                    self._seen[kind] = {each["metadata"]["name"]: dict(each) for each in state.values()}
                    self._judge(kind)
                    self._news.notify_all()

    def _judge(self, kind: Resource) -> None:
        """Note broken rules."""
        if kind == ELASTIC_JOBS:
            for job in self._seen[kind].values():
                if holds(job.get("status") or {}, "Finished"):
                    self._finished.setdefault(_uid(job), int(job["metadata"]["resourceVersion"]))
        if kind != PODS:
            return
        for name in self._jobs_of_pods():
            pods = self._live(name)
            places = Counter(map(index_of, pods.values()))
            twice = sorted(index for index, count in places.items() if count > 1)
            if twice:
                self.wrongs.append(f"{name} has two live pods of index {twice}: {sorted(pods)}")
            job = self._seen[ELASTIC_JOBS].get(name)
            if job is not None and len(pods) > job["spec"]["maxReplicas"]:
                self.wrongs.append(f"{name} has more pods than it may: {sorted(pods)}")
        for pod in self._seen[PODS].values():
            if _uid(pod) in self._known:
                continue
            self._known.add(_uid(pod))
            # Resource versions of one API server increase over all kinds of objects.
            for owner in pod["metadata"].get("ownerReferences", ()):
                end = self._finished.get(owner["uid"])
                if end is not None and int(pod["metadata"]["resourceVersion"]) > end:
                    self.wrongs.append(f"{pod['metadata']['name']} was made after the end of its job")

    def _is_told(self, name: str) -> bool:
        """Whether a job's status is about its present spec and its present pods."""
        job = self._seen[ELASTIC_JOBS][name]
        status = job.get("status") or {}
        told = (status.get("observedGeneration"), status.get("replicas"))
        return told == (job["metadata"]["generation"], len(self._live(name)))

    def _owned(self, kind: Resource) -> list[str]:
        """The objects of existing jobs; Kubernetes removes those of other jobs later."""
        jobs = {_uid(job) for job in self._seen[ELASTIC_JOBS].values()}
        return sorted(
            name
            for name, body in self._seen[kind].items()
            if jobs & {owner["uid"] for owner in body["metadata"].get("ownerReferences", ())}
        )

    def _jobs_of_pods(self) -> set[str]:
        return {pod["metadata"]["labels"].get(LABEL_JOB, "") for pod in self._seen[PODS].values()}

    def _live(self, name: str) -> Objects:
        labels = {LABEL_JOB: name, LABEL_ROLE: ROLE_WORKER}.items()
        return live({key: pod for key, pod in self._seen[PODS].items() if labels <= pod["metadata"]["labels"].items()})


def _plain(status: Json) -> Json:
    """A status without times and random names."""
    plain: Json = json.loads(_OF_PODS.sub(r"\1", json.dumps(status)))
    for name in _TIMES:
        if name in plain:
            plain[name] = "some time"
    plain.get("lastFailure", {}).pop("time", None)
    plain["timeBreakdown"] = "timeBreakdown" in plain
    for condition in plain.get("conditions", ()):
        condition.pop("lastTransitionTime")
    # An operator that was killed in between need not remember these.
    for name in ("countedPodUIDs", "sizeGeneration"):
        plain.pop(name, None)
    return plain


def _differences(wanted: Json, found: Json) -> str:
    """The differences between the two, line by line."""
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
