"""Call a function in the pods of an ElasticJob: ``launch(func, hostnames="kubernetes", image=…, workers=(2, 4))``.

The operator runs the job as any other; its agents form the rounds through the job's etcd. The launcher follows the
pods, and connects to the agent of each through the API server, because a pod cannot connect to a laptop. The function,
the values and the logs use these connections only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import yaml

from elastic_operator.api.constants import LABEL_INDEX, hostname, worker_selector
from elastic_operator.api.json_values import get_dict, get_dicts, get_list, get_str
from elastic_operator.api.spec import WORKER
from elastic_operator.client.cluster import UserApi, readable_errors
from elastic_operator.errors import BadInput, ClusterError, ElasticJobError
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS, ApiError
from torchelastic.errors import SettingsError
from torchelastic.launcher.channel import Channel
from torchelastic.launcher.head import AgentFailedError, Node
from torchelastic.protocol.pod import CALLS_MODULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from elastic_operator.api.json_values import Json
    from elastic_operator.kubernetes.client import Resource
    from torchelastic.launcher.head import Events
    from torchelastic.launcher.launcher import Launcher

_KEEP: Final = "keep"
_WATCH_SECONDS: Final = 60
"""Seconds after which the API server ends a watch, and it begins again; a broken connection is noticed by then."""
_RETRY_DELAY: Final = 0.3
_CHUNK: Final = 128 << 10
_ENDED_JOBS_KEPT: Final = 3600
"""Seconds after which the operator deletes a job whose launcher has died; a large result must have arrived by then."""


class JobCluster:
    """The pods of an ElasticJob, for one launch; see :class:`torchelastic.launcher.head.Cluster`.

    Args:
        launcher: the settings of the launch. If it names a job, that job exists; otherwise the launch creates one.

    Attributes:
        job: the name of the job.
        hosts: the names of the pods' hosts; only the first of a job that exists, whose size is not known yet.

    Raises:
        SettingsError: a setting is invalid; the message states what to change.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._settings = launcher
        self._manifest = None if launcher.job else manifest_for(launcher)
        self.job = launcher.job or str(get_dict(self._manifest)["metadata"]["name"])
        pods = 0 if self._manifest is None else self._manifest["spec"]["maxReplicas"]
        self.hosts = [hostname(self.job, index) for index in range(pods or 1)]
        self._namespace = launcher.namespace or get_str(self._manifest, "metadata", "namespace") or None
        self._min_pods = 1
        self._events: Events
        self._running: set[str] = set()
        self._served: set[str] = set()
        self._connected: set[str] = set()
        self._turn = asyncio.Event()
        self._waiting = ""
        self._problem = ""

    @contextlib.contextmanager
    def nodes(self, events: Events) -> Iterator[None]:
        """Create or take up the job, and connect to its pods; at the end, delete it unless it is kept.

        Raises:
            AgentFailedError: the API server refuses the job, or cannot be reached.
            SettingsError: the kubeconfig or the job is invalid.
        """
        self._events = events
        started: Future[None] = Future()
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._run(started))

        def run() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
            loop.close()

        thread = threading.Thread(target=run, name="torchelastic: kubernetes", daemon=True)
        thread.start()
        try:
            started.result()
            yield
        except BadInput as error:
            raise SettingsError(f"{error}") from None
        except ElasticJobError as error:
            raise AgentFailedError(f"{error}") from None
        finally:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(task.cancel)
            thread.join()

    async def _run(self, started: Future[None]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                api = await stack.enter_async_context(await _connection())
                namespace = self._namespace = self._namespace or api.namespace
                missing = f"there is no namespace {namespace}"
                if self._manifest is None:
                    missing = f"there is no ElasticJob {self.job} in the namespace {namespace}"
                begins = asyncio.create_task(self._begin(api))
                stack.push_async_callback(self._end, api, begins)
                with readable_errors(missing):
                    job = await asyncio.shield(begins)  # if it is canceled, the job may exist nevertheless
                if self._settings.keep:
                    self._settings.job = self.job
                spec = get_dict(job, "spec")
                self._min_pods = int(spec.get("minReplicas") or 1)
                pods = int(spec.get("replicas") or spec.get("maxReplicas") or self._min_pods)
                self.hosts = [hostname(self.job, index) for index in range(pods)]
                started.set_result(None)
                async with asyncio.TaskGroup() as tasks:
                    selected = {"fieldSelector": f"metadata.name={self.job}"}
                    tasks.create_task(self._watch(api, ELASTIC_JOBS, selected, self._take_job))
                    selected = {"labelSelector": worker_selector(self.job)}
                    tasks.create_task(
                        self._watch(api, PODS, selected, lambda kind, pod: self._take_pod(api, tasks, kind, pod))
                    )
                    tasks.create_task(self._limit())
                    tasks.create_task(self._notice_deletion(api))
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            elif not isinstance(error, asyncio.CancelledError):
                self._fail(f"The connection to the ElasticJob {self.job} has failed: {error!r}.")
                raise

    async def _begin(self, api: UserApi) -> Json:
        """Create or find the job."""
        if self._manifest is not None:
            self._turn.set()  # no other program knows the job
            return await api.create(ELASTIC_JOBS, str(self._namespace), self._manifest)
        job = await api.get(ELASTIC_JOBS, str(self._namespace), self.job)
        _check_takes_calls(job, self._settings)
        return job

    async def _end(self, api: UserApi, begins: asyncio.Task[Json]) -> None:
        with contextlib.suppress(ElasticJobError):  # it does not exist, or is gone, or the operator deletes it later
            job = await begins
            if not self._settings.keep or self._settings.job != self.job:  # an interrupt came before it was known
                uid = str(job["metadata"]["uid"])
                await api.delete(ELASTIC_JOBS, str(self._namespace), self.job, uid=uid)

    async def _limit(self) -> None:
        await asyncio.sleep(self._settings.agent_timeout)
        if len(self._connected) < self._min_pods:
            why = self._waiting or self._problem
            if not why and self._manifest is None:
                why = "another call may run in it"
            self._fail(
                f"Fewer than {self._min_pods} pods of the ElasticJob {self.job} have started within "
                f"{self._settings.agent_timeout:g} s{f': {why}' if why else ''}. Raise agent_timeout if they need more "
                "time."
            )

    async def _notice_deletion(self, api: UserApi) -> None:
        """Look for the job now and then, because a watch that begins after the deletion does not report it."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                await api.get(ELASTIC_JOBS, str(self._namespace), self.job)
            except ClusterError as error:
                if isinstance(error, ApiError) and error.not_found:
                    self._take_job("DELETED", {})

    def _fail(self, message: str) -> None:
        self._events.put((None, {"type": "failed", "message": message}, None))

    def _take_job(self, kind: str, job: Json) -> None:
        if kind == "DELETED":
            self._fail(f"The ElasticJob {self.job} was deleted.")
            return
        conditions = {get_str(each, "type"): each for each in get_dicts(job, "status", "conditions")}
        for name in ("Invalid", "Failed"):
            if get_str(conditions.get(name, {}), "status") == "True":
                self._fail(f"The ElasticJob {self.job} has failed: {get_str(conditions[name], 'message')}.")
        waiting = (conditions.get(name, {}) for name in ("Suspended", "ResourcesBlocked", "Waiting"))
        self._waiting = next((get_str(each, "message") for each in waiting if get_str(each, "status") == "True"), "")
        if not conditions:
            self._waiting = "the operator has not taken it up; see that it is installed and runs"
        self._events.put((None, {"type": "waiting", "message": self._waiting}, None))

    def _take_pod(self, api: UserApi, tasks: asyncio.TaskGroup, kind: str, pod: Json) -> None:
        uid = get_str(pod, "metadata", "uid")
        states = {
            get_str(each, "name"): get_dict(each, "state") for each in get_dicts(pod, "status", "containerStatuses")
        }
        if kind == "DELETED" or "running" not in states.get(WORKER, {}):
            self._running.discard(uid)
            return
        self._running.add(uid)
        if uid not in self._served:
            tasks.create_task(self._serve(api, pod, uid, is_first=not self._served))
            self._served.add(uid)

    async def _serve(self, api: UserApi, pod: Json, uid: str, *, is_first: bool) -> None:
        """Pass the messages of a pod's agent on until the call has ended; connect again if the connection breaks.

        Programs that call functions in the same job wait for their turn at its first pod. Otherwise, each of them could
        wait for a pod that another one has.
        """
        name, index = get_str(pod, "metadata", "name"), get_str(pod, "metadata", "labels", LABEL_INDEX)
        command = [self._settings.python or "python3", "-m", "torchelastic.launcher.relay"]
        try:
            if not is_first:
                await self._turn.wait()
            while uid in self._running:
                try:
                    stream = await api.execute(str(self._namespace), name, WORKER, command)
                except ClusterError as error:
                    if isinstance(error, ApiError) and error.not_found:
                        return
                    self._refused(error)
                else:
                    async with stream:
                        if await self._connect(stream, uid, hostname(self.job, int(index or 0))):
                            return
                await asyncio.sleep(_RETRY_DELAY)
        finally:
            self._turn.set()

    async def _connect(self, stream: aiohttp.ClientWebSocketResponse, uid: str, host: str) -> bool:
        """Pass messages on until one side ends; return whether it is the launcher, after the call."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        node = Node(host, Channel(os.dup(ours.fileno()), ours.detach(), pings=True), self._events)
        self._events.put((node, {"type": "connected"}, None))
        node.start()

        def has_begun() -> None:
            self._connected.add(uid)
            self._turn.set()

        with theirs:
            sending = asyncio.create_task(_send(theirs, stream))
            receiving = asyncio.create_task(_receive(stream, theirs, has_begun))
            tasks = sending, receiving
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                sent, received = await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(received, str):
                self._problem = node.problem = received
        return sent is None

    def _refused(self, error: ClusterError) -> None:
        """Fail if a permission is missing; a launch that has begun outlives errors of the API server."""
        self._problem = f"{error}"
        if isinstance(error, ApiError) and error.status == 403 and not self._connected:
            self._fail(f"You may not use the pods of the ElasticJob {self.job}: {error.message}.")

    async def _watch(
        self, api: UserApi, resource: Resource, selected: Mapping[str, str], handle: Callable[[str, Json], None]
    ) -> None:
        """Call ``handle`` with the kind of the event and the object for each object and change, until canceled."""
        query = {**selected, "watch": "1", "timeoutSeconds": f"{_WATCH_SECONDS}"}
        while True:
            rest = b""
            try:
                path = resource.path(self._namespace)
                async for piece in api.stream(path, query, silence=_WATCH_SECONDS + 10.0):
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        event = msgspec.json.decode(line)
                        if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                            handle(event["type"], event["object"])
            except ClusterError as error:
                self._refused(error)
            await asyncio.sleep(_RETRY_DELAY)


async def _send(source: socket.socket, stream: aiohttp.ClientWebSocketResponse) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, _CHUNK):
        await stream.send_bytes(b"\0" + data)


async def _receive(
    stream: aiohttp.ClientWebSocketResponse, target: socket.socket, has_begun: Callable[[], None]
) -> str:
    """Pass the agent's messages on; return why the connection has ended, if that is known."""
    loop, errors = asyncio.get_running_loop(), b""
    async for message in stream:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data[1:]:
            continue
        match message.data[0]:
            case 1:
                has_begun()
                await loop.sock_sendall(target, memoryview(message.data)[1:])
            case 2:
                errors = (errors + message.data[1:])[-4096:]
            case 3:
                status = json.loads(message.data[1:])
                if not errors and status.get("status") == "Failure":
                    errors = str(status.get("message")).encode()
    return (errors.decode(errors="replace").strip().splitlines() or [""])[-1]


async def _connection() -> UserApi:
    """Return a connection with the kubeconfig or, in a pod without one, with its service account."""
    has_kubeconfig = bool(os.environ.get("KUBECONFIG")) or Path(os.path.expanduser("~/.kube/config")).is_file()
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    return await (UserApi.in_cluster() if in_pod and not has_kubeconfig else UserApi.from_kubeconfig())


def manifest_for(launcher: Launcher) -> dict[str, Any]:
    """Return the ElasticJob of a launch.

    Raises:
        SettingsError: the file of ``manifest`` cannot be read, or has no image.
    """
    path = launcher.manifest
    job = _read(Path(path)) if path is not None else {}
    workers = (
        launcher.workers_per_host if isinstance(launcher.workers_per_host, int) else _gpus(launcher.resources) or 1
    )
    smallest, largest = launcher.worker_bounds or (workers, workers)
    if smallest % workers or largest % workers:
        raise SettingsError(
            f"workers is {launcher.workers!r}: both numbers must be multiples of workers_per_host ({workers})."
        )
    spec = {name: value for name, value in get_dict(job, "spec").items() if name not in ("command", "replicas")}
    if launcher.image is not None:
        spec["image"] = launcher.image
    spec |= {
        "minReplicas": smallest // workers,
        "maxReplicas": largest // workers,
        "nprocPerNode": workers,
        "maxRestarts": launcher.max_restarts,
        "args": ["-m", CALLS_MODULE, *([_KEEP] if launcher.keep else [])],
        "cleanPodPolicy": "None",  # the launcher deletes the job, after it has read the results
    }
    if not launcher.keep:
        spec["ttlSecondsAfterFinished"] = _ENDED_JOBS_KEPT
    container = _worker_container(spec, path)
    if "image" not in spec and "image" not in container:
        raise SettingsError(
            'hostnames="kubernetes" needs image: an image with the same versions of Python and torchelastic.'
        )
    for name in ("command", "args"):
        container.pop(name, None)
    if launcher.resources:
        container["resources"] = {"requests": {**launcher.resources}, "limits": {**launcher.resources}}
    if launcher.heartbeat_timeout is not None:
        variables = [
            *get_dicts(container, "env"),
            {"name": "PET_HEARTBEAT_TIMEOUT", "value": f"{launcher.heartbeat_timeout:g}"},
        ]
        container["env"] = variables
    metadata = {**get_dict(job, "metadata")}
    metadata["name"] = get_str(metadata, "name") or f"launch-{secrets.token_hex(3)}"
    if launcher.namespace is not None:
        metadata["namespace"] = launcher.namespace
    return {"apiVersion": ELASTIC_JOBS.api_version, "kind": ELASTIC_JOBS.kind, "metadata": metadata, "spec": spec}


def _worker_container(spec: dict[str, Any], manifest: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the container of the workers in a job's template; it is added if it is missing."""
    template = spec["template"] = spec.get("template") or {}
    inner = template.setdefault("spec", {}) if isinstance(template, dict) else None
    containers: list[dict[str, Any]] | None = inner.setdefault("containers", []) if isinstance(inner, dict) else None
    if not isinstance(containers, list) or not all(isinstance(each, dict) for each in containers):
        raise SettingsError(
            f"manifest {manifest} is not an ElasticJob: spec.template must be a pod template with a list of containers."
        )
    for container in containers:
        if container.get("name") == WORKER:
            return container
    containers.append(container := {"name": WORKER})
    return container


def _gpus(resources: Mapping[str, Any] | None) -> int:
    amount = next((f"{amount}" for name, amount in (resources or {}).items() if name.endswith("/gpu")), "0")
    if not amount.isdecimal():
        raise SettingsError(f"resources is {resources!r}: the number of GPUs must be a whole number.")
    return int(amount)


def _read(path: Path) -> dict[str, Any]:
    try:
        job = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise SettingsError(f"manifest {path} cannot be read: {why}.") from None
    if not isinstance(job, dict) or job.get("kind") != ELASTIC_JOBS.kind or not isinstance(job.get("spec", {}), dict):
        raise SettingsError(f"manifest {path} is not an ElasticJob.")
    return job


def _check_takes_calls(job: Json, launcher: Launcher) -> None:
    """Raise BadInput if a job takes no calls, or does not have what a launcher asks for."""
    name, spec = get_str(job, "metadata", "name"), get_dict(job, "spec")
    if not {CALLS_MODULE, _KEEP} <= {*get_list(spec, "args")}:
        raise BadInput(f"the ElasticJob {name} takes no calls: create it with Launcher(…, keep=True)")
    count = spec.get("nprocPerNode")
    if isinstance(launcher.workers_per_host, int) and launcher.workers_per_host != count:
        raise BadInput(f"the ElasticJob {name} has {count} workers per host, not {launcher.workers_per_host}")
