"""Access to the jobs on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

from elastic_operator.api.constants import LABEL_JOB, LABEL_ROLE, ROLE_WORKER, report_name, worker_selector
from elastic_operator.api.json_values import Json, get_dicts, get_int, get_str
from elastic_operator.api.spec import GROUP
from elastic_operator.api.status import REPORT_KEY
from elastic_operator.client import LogSelector, ScrapedJob, still_running
from elastic_operator.client.cluster_logs import ClusterLogs, is_finished, uid_of
from elastic_operator.errors import BadInput, ClusterError, NotFound
from elastic_operator.kubernetes.client import CONFIG_MAPS, ELASTIC_JOBS, EVENTS, PODS, Api, ApiError, Resource
from elastic_operator.kubernetes.pod_status import event_time, pod_of
from elastic_operator.views.job_view import EventView, JobView, PodView, RunView
from elastic_operator.views.top import MAX_PAGE, scrape
from torchelastic.protocol.records import bracketed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from kubernetes.aio.client import Configuration

    from elastic_operator.client import Notify
    from elastic_operator.views.top import Fetch


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_UNKNOWN_KIND: Final = "could not find the requested resource"
_SEE_LIST: Final = "`elasticjob get` with the same flags lists the existing jobs"
_POLL_INTERVAL: Final = 1.0
"""Seconds between two checks for the objects of a deleted job."""


def _blocking(
    method: Callable[Concatenate[ClusterJobs, _Parameters], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[ClusterJobs, _Parameters], _Result]:
    """Make a method synchronous: a call runs it in the client's event loop."""

    @functools.wraps(method)
    def call(self: ClusterJobs, /, *args: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        return self._runner.run(method(self, *args, **keywords))

    return call


class UserApi(Api):
    """A connection to the API server without a limit on concurrent requests."""

    def __init__(self, configuration: Configuration, namespace: str = "default") -> None:
        super().__init__(configuration, namespace)
        configuration.connection_pool_maxsize = 0  # unlimited: each followed log holds a connection


class ClusterJobs:
    """Access to the jobs of one namespace, or of all namespaces."""

    start_command = "kubectl apply -f FILE"

    def __init__(
        self, connection: AbstractAsyncContextManager[UserApi], notify: Notify, *, all_namespaces: bool = False
    ) -> None:
        self._connection = connection
        self._notify = notify
        self._all_namespaces = all_namespaces
        self._runner = asyncio.Runner()
        try:
            self._api = self._runner.run(connection.__aenter__())
        except BaseException:
            self._runner.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        with self._runner:
            self._runner.run(self._connection.__aexit__(None, None, None))

    @property
    def place(self) -> str:
        """The location of the jobs, for messages."""
        return "in any namespace" if self._all_namespaces else f"in the namespace {self._api.namespace}"

    @_blocking
    async def jobs(self, name: str | None, *, every_run: bool) -> list[JobView]:  # noqa: ARG002
        """Return all jobs, or the named one, without pods."""
        return await self._views(name, pods=False)

    @_blocking
    async def describe(self, name: str) -> JobView:
        """Return a job with its pods and events."""
        job = await self._job(name)
        pods = await self._list(PODS, labels=worker_selector(name))
        events = await self._list(EVENTS, fields=f"involvedObject.uid={uid_of(job)}")
        return view_of(job, pods, events)

    @_blocking
    async def scrape(self, name: str | None) -> list[ScrapedJob]:
        """Read the metrics of all agents of a job; if ``name`` is None, those of the leader of each job."""
        notes: list[str] = []
        jobs = await self._views(name, notify=notes.append if name else lambda _: None)
        if name:
            hidden = [pod for pod in jobs[0].living_pods if pod.ready and not pod.metrics_url]
            notes += [f"{pod.name} has not announced the port of its metrics yet" for pod in hidden[:1]]
        read = await scrape([(job.pods, self._fetch_from(job.namespace)) for job in jobs], leaders=name is None)
        return [ScrapedJob(job, pages, [*notes, *more]) for job, (pages, more) in zip(jobs, read, strict=True)]

    @_blocking
    async def logs(self, name: str, selector: LogSelector, write: Callable[[bytes], object]) -> bool:
        """Write a job's logs; return whether all of them could be read."""
        job = await self._job(name)
        with readable_errors(f"the namespace {self._api.namespace} is gone"):
            return await ClusterLogs(self._api, job, selector, write, self._notify).print()

    @_blocking
    async def report(self, name: str) -> tuple[bytes, str]:
        """Return the report that the operator wrote, and an empty string: only jobs on this machine have runs."""
        job = await self._job(name)
        missing = (
            f"the job {name} has ended without a report; did it end before this version of the operator was installed?"
            if is_finished(job)
            else still_running(name, get_str(job, "status", "state") or "Pending")
        )
        with readable_errors(missing):
            kept = await self._api.get(CONFIG_MAPS, self._api.namespace, report_name(name))
        if not _belongs(kept, uid_of(job)):
            raise NotFound(missing)
        return get_str(kept, "data", REPORT_KEY).encode(), ""

    @_blocking
    async def scale(self, name: str, replicas: int) -> None:
        """Change the number of a job's pods."""
        await self._change(name, {"replicas": replicas}, "scale")

    @_blocking
    async def suspend(self, name: str, *, suspended: bool) -> None:
        """Suspend or resume a job."""
        await self._change(name, {"suspend": suspended})

    @_blocking
    async def delete(self, name: str, *, wait: bool) -> None:
        """Delete a job; if ``wait``, wait until the job and those of its pods that the user may see are gone."""
        uid = uid_of(await self._job(name))
        with self._readable_errors(name):
            await self._api.delete(ELASTIC_JOBS, self._api.namespace, name, uid=uid)
            while wait:
                jobs, _ = await self._api.list(ELASTIC_JOBS, self._api.namespace, name=name)
                pods = await self._list(PODS, labels=f"{LABEL_JOB}={name}", notify=lambda _: None)
                # A new job of the same name has pods of its own.
                if not any(uid_of(each) == uid for each in jobs) and not any(_belongs(each, uid) for each in pods):
                    return
                await asyncio.sleep(_POLL_INTERVAL)

    async def _jobs(self) -> list[Json]:
        with readable_errors("there are no ElasticJobs"):
            found, _ = await self._api.list(ELASTIC_JOBS, None if self._all_namespaces else self._api.namespace)
        # The API server omits these two fields in the items of a list.
        head = {"apiVersion": ELASTIC_JOBS.api_version, "kind": ELASTIC_JOBS.kind}
        return [{**head, **job} for job in sorted(found, key=_key)]

    async def _job(self, name: str) -> Json:
        if not _NAME.fullmatch(name):
            raise BadInput(f"invalid job name {name!r}; {_SEE_LIST}")
        with self._readable_errors(name):
            return await self._api.get(ELASTIC_JOBS, self._api.namespace, name)

    async def _views(self, name: str | None, *, pods: bool = True, notify: Notify | None = None) -> list[JobView]:
        """Return all jobs, or the named one, with their worker pods."""
        jobs = await self._jobs() if name is None else [await self._job(name)]
        workers: dict[tuple[str, str], list[Json]] = {}
        if pods and jobs:
            labels = f"{LABEL_JOB},{LABEL_ROLE}={ROLE_WORKER}" if name is None else worker_selector(name)
            for pod in await self._list(PODS, labels=labels, notify=notify):
                key = get_str(pod, "metadata", "namespace"), get_str(pod, "metadata", "labels", LABEL_JOB)
                workers.setdefault(key, []).append(pod)
        return [view_of(job, workers.get(_key(job), ())) for job in jobs]

    async def _list(
        self, kind: Resource, *, labels: str = "", fields: str = "", notify: Notify | None = None
    ) -> list[Json]:
        """Return the objects of a kind; if the user may not list them, notify the user and return an empty list."""
        namespace = None if self._all_namespaces else self._api.namespace
        try:
            found, _ = await self._api.list(kind, namespace, labels=labels, fields=fields)
        except ApiError as error:
            if error.status != 403:
                raise
            (notify or self._notify)(f"you may not see the {kind.plural} of this namespace, so none are shown")
            return []
        return found

    def _fetch_from(self, namespace: str) -> Fetch:
        async def fetch(pod: PodView) -> str:
            url, page = urlsplit(pod.metrics_url or ""), bytearray()
            path = PODS.path(namespace, f"{pod.name}:{url.port or 0}", f"proxy{url.path}")
            pieces = self._api.stream(path, {})
            try:
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        page += piece
                        if len(page) > MAX_PAGE:
                            raise ClusterError(f"its response to a request for {url.path} is too large")
            except ApiError as error:
                if error.status in (401, 403):
                    raise ClusterError(
                        "its metrics cannot be read; grant yourself `get` on pods/proxy, unless the pod itself refuses"
                    ) from None
                raise ClusterError(f"its agent does not answer ({error.message})") from None
            return page.decode(errors="replace")

        return fetch

    async def _change(self, name: str, spec: Json, subresource: str = "") -> None:
        job = await self._job(name)
        if is_finished(job):
            state = get_str(job, "status", "state")
            raise BadInput(f"the job {name} has ended ({state}) and can no longer be changed")
        with self._readable_errors(name):
            await self._api.patch(ELASTIC_JOBS, self._api.namespace, name, {"spec": spec}, subresource)

    def _readable_errors(self, name: str) -> contextlib.AbstractContextManager[None]:
        return readable_errors(f"there is no job {name} in the namespace {self._api.namespace}; {_SEE_LIST}")


@contextlib.asynccontextmanager
async def connect(
    environ: Mapping[str, str],
    *,
    kubeconfig: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> AsyncGenerator[UserApi, None]:
    """Connect to the cluster that the command line names; None stands for kubectl's default.

    Raises:
        BadInput: the kubeconfig, context or namespace is invalid.
    """
    if namespace is not None and not _LABEL.fullmatch(namespace):
        raise BadInput(f"invalid namespace {namespace!r}; check the value of -n")
    api = await UserApi.from_kubeconfig(kubeconfig, context, environ)
    api.namespace = namespace or api.namespace
    async with api:
        yield api


@contextlib.contextmanager
def readable_errors(not_found: str) -> Iterator[None]:
    """Convert the API server's errors into errors that say what to do; ``not_found`` is the message for 404."""
    try:
        yield
    except ApiError as error:
        match error.status:
            case 401:
                sentence = "the API server does not accept these credentials; log in again, or name another --context"
            case 403:
                sentence = f"you may not do this on this cluster: {error.message}"
            case 404 if error.reason == "NotFound" and _UNKNOWN_KIND not in error.message:
                raise NotFound(not_found) from None
            case 404:
                sentence = (
                    f"this cluster does not know ElasticJobs (elasticjobs.{GROUP}); install the operator with "
                    "`helm install elastic-operator charts/`, or name another --context"
                )
            case _ if error.invalid:
                raise BadInput(error.message) from None
            case _:
                raise
        raise ClusterError(sentence) from None


def view_of(job: Json, pods: Iterable[Json] = (), events: Iterable[Json] = ()) -> JobView:
    """Return the view of a job with its worker pods and its events."""
    metadata = {key: value for key, value in job["metadata"].items() if key != "managedFields"}
    return JobView(
        manifest={key: value for key, value in job.items() if key != "status"} | {"metadata": metadata},
        status_json=job.get("status") or {},
        pods=tuple(map(_pod, pods)),
        events=tuple(sorted(map(_event, events), key=lambda event: event.time)),
        run=RunView(alive=True),
    )


def _pod(obj: Json) -> PodView:
    pod, address = pod_of(obj), get_str(obj, "status", "podIP")
    note = "another of its containers still runs" if pod.sidecars_running else pod.waiting
    return PodView.of(
        pod,
        ranks=None,  # only the agents know the ranks
        metrics_url=f"http://{bracketed(address)}:{pod.metrics_port}/metrics" if address and pod.metrics_port else None,
        node=pod.node,
        address=address,
        note=note if pod.incompatible_image is None else pod.incompatible_image.message,
    )


def _event(obj: Json) -> EventView:
    return EventView(
        time=float(event_time(obj)),
        reason=get_str(obj, "reason"),
        message=get_str(obj, "message"),
        warning=get_str(obj, "type") == "Warning",
        count=get_int(obj, "series", "count") or get_int(obj, "count") or 1,
    )


def _key(obj: Json) -> tuple[str, str]:
    return str(obj["metadata"]["namespace"]), str(obj["metadata"]["name"])


def _belongs(dependent: Json, uid: str) -> bool:
    """Return whether the job with this UID owns an object, or no job does; another job may have the same name."""
    owners = get_dicts(dependent, "metadata", "ownerReferences")
    jobs = {get_str(owner, "uid") for owner in owners if owner.get("kind") == ELASTIC_JOBS.kind}
    return not jobs or uid in jobs
