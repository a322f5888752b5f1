"""Call a function in the pods of an ElasticJob: ``launch(func, hostnames="kubernetes", image=…, workers=(2, 4))``.

The operator runs the job as any other; its agents form the rounds through the job's etcd. The launcher follows the
pods, and connects to the agent of each through the API server, because a pod cannot connect to a laptop. The function,
the values and the logs use these connections only.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
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
from elastic_operator.api.json_values import get_dict, get_dicts, get_str
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
_PING_INTERVAL: Final = 5.0
_CHUNK: Final = 128 << 10
_FAILED_JOBS_KEPT: Final = 60
"""Seconds after which the operator deletes a job whose launcher has died."""


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
        self._namespace = launcher.namespace
        self._min_pods = 1
        self._events: Events
        self._connected: set[str] = set()
        self._waiting = ""

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
                with readable_errors(f"there is no ElasticJob {self.job} in the namespace {namespace}"):
                    if self._manifest is None:
                        job = await api.get(ELASTIC_JOBS, namespace, self.job)
                        _check_takes_calls(job)
                    else:
                        job = await api.create(ELASTIC_JOBS, namespace, self._manifest)
                stack.push_async_callback(self._end, api, str(job["metadata"]["uid"]))
                self._min_pods = int(get_dict(job, "spec").get("minReplicas") or 1)
                started.set_result(None)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(
                        _watch(
                            api, ELASTIC_JOBS, namespace, {"fieldSelector": f"metadata.name={self.job}"}, self._take_job
                        )
                    )
                    selected = {"labelSelector": worker_selector(self.job)}
                    tasks.create_task(
                        _watch(api, PODS, namespace, selected, lambda kind, pod: self._take_pod(api, tasks, kind, pod))
                    )
                    tasks.create_task(self._limit())
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            elif not isinstance(error, asyncio.CancelledError):
                self._fail(f"The connection to the ElasticJob {self.job} has failed: {error!r}.")
                raise

    async def _end(self, api: UserApi, uid: str) -> None:
        if not self._settings.keep:
            with contextlib.suppress(ClusterError):  # it is gone, or the operator deletes it later
                await api.delete(ELASTIC_JOBS, str(self._namespace), self.job, uid=uid)

    async def _limit(self) -> None:
        await asyncio.sleep(self._settings.agent_timeout)
        if len(self._connected) < self._min_pods:
            why = f": {self._waiting}" if self._waiting else ""
            self._fail(
                f"Fewer than {self._min_pods} pods of the ElasticJob {self.job} have started within "
                f"{self._settings.agent_timeout:g} s{why}. Raise agent_timeout if they need more time."
            )

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
        waiting = conditions.get("ResourcesBlocked", {}), conditions.get("Waiting", {})
        self._waiting = next((get_str(each, "message") for each in waiting if get_str(each, "status") == "True"), "")

    def _take_pod(self, api: UserApi, tasks: asyncio.TaskGroup, kind: str, pod: Json) -> None:
        uid = get_str(pod, "metadata", "uid")
        states = {
            get_str(each, "name"): get_dict(each, "state") for each in get_dicts(pod, "status", "containerStatuses")
        }
        if kind != "DELETED" and "running" in states.get(WORKER, {}) and uid not in self._connected:
            self._connected.add(uid)
            tasks.create_task(
                self._serve(api, get_str(pod, "metadata", "name"), get_str(pod, "metadata", "labels", LABEL_INDEX))
            )

    async def _serve(self, api: UserApi, pod: str, index: str) -> None:
        """Pass the messages of a pod's agent on until one side ends."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        node = Node(hostname(self.job, int(index or 0)), Channel(os.dup(ours.fileno()), ours.detach()), self._events)
        self._events.put((node, {"type": "connected"}, None))
        node.start()
        python = self._settings.python or "python3"
        with theirs:
            try:
                stream = await api.execute(
                    str(self._namespace), pod, WORKER, [python, "-m", "torchelastic.launcher.relay"]
                )
                async with stream:
                    sending = asyncio.create_task(_send(theirs, stream, node))
                    try:
                        node.problem = await _receive(stream, theirs)
                    finally:
                        sending.cancel()
            except (ClusterError, OSError) as error:
                node.problem = f"{error}"


async def _send(source: socket.socket, stream: aiohttp.ClientWebSocketResponse, node: Node) -> None:
    loop = asyncio.get_running_loop()

    def ping() -> asyncio.TimerHandle:
        node.channel.send({"type": "ping"})
        return loop.call_later(_PING_INTERVAL, ping)

    timer = ping()
    try:
        while data := await loop.sock_recv(source, _CHUNK):
            await stream.send_bytes(b"\0" + data)
    finally:
        timer.cancel()
        await stream.close()


async def _receive(stream: aiohttp.ClientWebSocketResponse, target: socket.socket) -> str:
    """Pass the agent's messages on; return why the connection has ended, if that is known."""
    loop, errors = asyncio.get_running_loop(), b""
    async for message in stream:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        match message.data[0]:
            case 1:
                await loop.sock_sendall(target, memoryview(message.data)[1:])
            case 2:
                errors = (errors + message.data[1:])[-4096:]
            case 3:
                status = json.loads(message.data[1:])
                if not errors and status.get("status") == "Failure":
                    errors = str(status.get("message")).encode()
    return (errors.decode(errors="replace").strip().splitlines() or [""])[-1]


async def _watch(
    api: UserApi, resource: Resource, namespace: str, selected: Mapping[str, str], handle: Callable[[str, Json], None]
) -> None:
    """Call ``handle`` with the kind of the event and the object for each object and change, until canceled."""
    query = {**selected, "watch": "1", "timeoutSeconds": f"{_WATCH_SECONDS}"}
    while True:
        rest = b""
        with contextlib.suppress(ApiError, ClusterError):  # the API server is away; a launch outlives that
            async for piece in api.stream(resource.path(namespace), query, silence=_WATCH_SECONDS + 10.0):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    event = msgspec.json.decode(line)
                    if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                        handle(event["type"], event["object"])
        await asyncio.sleep(_RETRY_DELAY)


async def _connection() -> UserApi:
    """Return a connection with the kubeconfig or, in a pod without one, with its service account."""
    has_kubeconfig = bool(os.environ.get("KUBECONFIG")) or Path("~/.kube/config").expanduser().is_file()
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    return await (UserApi.in_cluster() if in_pod and not has_kubeconfig else UserApi.from_kubeconfig())


def manifest_for(launcher: Launcher) -> dict[str, Any]:
    """Return the ElasticJob of a launch.

    Raises:
        SettingsError: the file of ``manifest`` cannot be read, or has no image.
    """
    job = _read(Path(launcher.manifest)) if launcher.manifest is not None else {}
    workers = (
        launcher.workers_per_host if isinstance(launcher.workers_per_host, int) else _gpus(launcher.resources) or 1
    )
    smallest, largest = launcher.worker_bounds or (workers, workers)
    if smallest % workers or largest % workers:
        raise SettingsError(
            f"workers is {launcher.workers!r}: both numbers must be multiples of workers_per_host ({workers})."
        )
    spec = job.setdefault("spec", {})
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
    spec.pop("command", None)
    if not launcher.keep:
        spec["ttlSecondsAfterFinished"] = _FAILED_JOBS_KEPT
    container = _worker_container(spec)
    if "image" not in spec and "image" not in container:
        raise SettingsError(
            'hostnames="kubernetes" needs image: an image with the same versions of Python and torchelastic.'
        )
    if launcher.resources:
        container["resources"] = {"requests": {**launcher.resources}, "limits": {**launcher.resources}}
    if launcher.heartbeat_timeout is not None:
        variables = [
            *get_dicts(container, "env"),
            {"name": "PET_HEARTBEAT_TIMEOUT", "value": f"{launcher.heartbeat_timeout:g}"},
        ]
        container["env"] = variables
    name = get_str(job, "metadata", "name") or f"launch-{secrets.token_hex(3)}"
    metadata = {**get_dict(job, "metadata"), "name": name}
    return {"apiVersion": ELASTIC_JOBS.api_version, "kind": ELASTIC_JOBS.kind, "metadata": metadata, "spec": spec}


def _worker_container(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the container of the workers in a job's template; it is added if it is missing."""
    containers: list[dict[str, Any]] = (
        spec.setdefault("template", {}).setdefault("spec", {}).setdefault("containers", [])
    )
    for container in containers:
        if container.get("name") == WORKER:
            return container
    containers.append(container := {"name": WORKER})
    return container


def _gpus(resources: Mapping[str, str] | None) -> int:
    return next((int(amount) for name, amount in (resources or {}).items() if name.endswith("/gpu")), 0)


def _read(path: Path) -> dict[str, Any]:
    try:
        job = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"manifest {path} cannot be read: {' '.join(str(error).split())}.") from None
    if not isinstance(job, dict) or job.get("kind") != ELASTIC_JOBS.kind or not isinstance(job.get("spec", {}), dict):
        raise SettingsError(f"manifest {path} is not an ElasticJob.")
    return copy.deepcopy(job)


def _check_takes_calls(job: Json) -> None:
    args = [
        each
        for container in get_dicts(job, "spec", "template", "spec", "containers")
        for each in container.get("args", ())
    ]
    args += get_dict(job, "spec").get("args") or ()
    if CALLS_MODULE not in args or _KEEP not in args:
        name = get_str(job, "metadata", "name")
        raise BadInput(f"the ElasticJob {name} takes no calls: create it with Launcher(…, keep=True)")
