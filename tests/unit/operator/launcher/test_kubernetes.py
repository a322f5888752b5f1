"""``launch(func, hostnames="kubernetes")``: the job that it creates, and what an API server may answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import struct
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import WSMsgType, web

from elastic_operator.launcher.kubernetes import manifest_for
from testbed.control_plane_config import kubeconfig
from tests.support.object_server import answering
from torchelastic.errors import SettingsError
from torchelastic.launcher import AgentFailedError, Launcher, attach
from torchelastic.protocol.pod import CALLS_MODULE, ExitCode
from torchelastic.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/team/elasticjobs"
PODS = "/api/v1/namespaces/team/pods"
SIZES = struct.Struct(">IQ")


def made(launcher: Launcher) -> dict[str, Any]:
    return manifest_for(launcher)["spec"]


def pods_launcher(**settings: Any) -> Launcher:
    return Launcher("kubernetes", **{"image": "train:1", **settings})


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (1, 1, 1)),
        ({"workers": 4, "workers_per_host": 2}, (2, 2, 2)),
        ({"workers": (2, 6), "workers_per_host": 2}, (1, 3, 2)),
        ({"resources": {"cpu": 2, "nvidia.com/gpu": 8}, "workers": (8, 16)}, (1, 2, 8)),
        ({"workers_per_host": 3}, (1, 1, 3)),
    ],
)
def test_the_numbers_of_workers_make_the_pods(settings: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    spec = made(pods_launcher(**settings))
    assert (spec["minReplicas"], spec["maxReplicas"], spec["nprocPerNode"]) == sizes


def test_only_a_job_that_is_not_kept_is_deleted_after_its_end() -> None:
    job, kept = made(pods_launcher(max_restarts=2, heartbeat_timeout=0.5)), made(pods_launcher(keep=True))
    assert (job["args"], job["maxRestarts"]) == (["-m", CALLS_MODULE], 2)
    assert (kept["args"], "ttlSecondsAfterFinished" in kept) == (["-m", CALLS_MODULE, "keep"], False)
    assert job["ttlSecondsAfterFinished"] == 3600  # a large result may still arrive after the end of the run
    [container] = job["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "PET_HEARTBEAT_TIMEOUT", "value": "0.5"}]


MANIFEST = """\
kind: ElasticJob
metadata: {name: mine, namespace: team, labels: {a: b}}
spec:
  command: [python]
  args: [train.py]
  replicas: 9
  metricsPort: 7
  template:
    spec:
      volumes: [{name: data}]
      containers:
        - name: sidecar
        - {name: worker, image: "train:2", command: [python], args: [other.py], env: [{name: A, value: b}]}
"""


def test_the_other_fields_of_a_manifest_remain(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text(MANIFEST)
    job = manifest_for(Launcher("kubernetes", manifest=path, resources={"cpu": 1}, heartbeat_timeout=2))
    assert job["metadata"] == {"name": "mine", "namespace": "team", "labels": {"a": "b"}}
    spec = job["spec"]
    assert not {"command", "replicas"} & spec.keys()
    assert (spec["args"], spec["metricsPort"], spec["maxReplicas"]) == (["-m", CALLS_MODULE], 7, 1)
    assert spec["template"]["spec"]["volumes"] == [{"name": "data"}]
    assert spec["template"]["spec"]["containers"] == [
        {"name": "sidecar"},
        {
            "name": "worker",
            "image": "train:2",
            "env": [{"name": "A", "value": "b"}, {"name": "PET_HEARTBEAT_TIMEOUT", "value": "2"}],
            "resources": {"requests": {"cpu": 1}, "limits": {"cpu": 1}},
        },
    ]
    assert manifest_for(pods_launcher(manifest=path, namespace="other"))["metadata"]["namespace"] == "other"


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("a: [", " cannot be read: "),
        ("[]", " is not an ElasticJob."),
        ("kind: Pod", " is not an ElasticJob."),
        ("{kind: ElasticJob, spec: 3}", " is not an ElasticJob."),
        ("{kind: ElasticJob, spec: {template: 3}}", "a pod template with a list of containers."),
        ("{kind: ElasticJob, spec: {template: {spec: }}}", "a pod template with a list of containers."),
        ("{kind: ElasticJob, spec: {template: {spec: {containers: 3}}}}", "a pod template with a list of containers."),
        (
            "{kind: ElasticJob, spec: {template: {spec: {containers: [3]}}}}",
            "a pod template with a list of containers.",
        ),
    ],
)
def test_an_invalid_manifest_gets_one_sentence(manifest: str, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text(manifest)
    with pytest.raises(SettingsError) as caught:
        Launcher("kubernetes", image="train:1", manifest=path).run(print)
    assert f"manifest {path}" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image": None}, 'hostnames="kubernetes" needs image: '),
        ({"image": ""}, "image is '': "),
        ({"manifest": "/nothing"}, "manifest /nothing cannot be read: "),
        ({"manifest": 3}, "manifest is 3: "),
        ({"keep": 1}, "keep is 1: "),
        ({"namespace": "a/b"}, "namespace is 'a/b': "),
        ({"job": "../x"}, "job is '../x': "),
        ({"resources": {"cpu": None}}, "resources is {'cpu': None}: "),
        ({"resources": {"nvidia.com/gpu": "many"}}, "resources is {'nvidia.com/gpu': 'many'}: the number of GPUs"),
        ({"workers": 3, "workers_per_host": 2}, "workers is 3: both numbers must be multiples of workers_per_host (2)"),
        ({"workers_per_host": 0}, "workers_per_host is 0: "),
        ({"workers_per_host": [1, 2]}, "workers_per_host is [1, 2]: "),
        ({"workers_per_host": "cpu"}, "workers_per_host is 'cpu': "),
        ({"ssh_config_file": __file__}, 'ssh_config_file has no effect with hostnames="kubernetes"'),
    ],
)
def test_a_wrong_argument_gets_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        pods_launcher(**settings).run(print)
    assert str(caught.value).startswith(message)


class Pods:
    """An API server with a job of two pods, whose agents succeed at once, unless a test changes the answer to a path.

    Attributes:
        answers: the answers by method and path, instead of the usual ones.
        seen: the method and path of each request.
        calls: the names of the pods that have got a call, in order.
        closed: set when the launch has ended, so that the watches end.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] = {}
        self.seen: list[str] = []
        self.calls: list[str] = []
        self.closed = asyncio.Event()
        self.job: dict[str, Any] = {
            "metadata": {"name": "kept", "uid": "1"},
            "spec": {"minReplicas": 2, "nprocPerNode": 1, "args": ["-m", CALLS_MODULE, "keep"]},
            "status": {"conditions": [{"type": "Waiting", "status": "False"}]},
        }

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path.replace(str(self.job["metadata"]["name"]), "JOB")
        self.seen.append(name := f"{request.method} {path}")
        if name in self.answers:
            return await self.answers[name](request)
        if request.method == "POST":
            self.job = await request.json()
            self.job["metadata"]["uid"] = "1"
        if path.endswith("/exec"):
            return await self.agent(request)
        if "watch" not in request.query:
            return web.json_response(self.job)
        objects = [self.job] if path == JOBS else [self.pod(0), self.pod(1)]
        response = web.StreamResponse()
        await response.prepare(request)
        for each in objects:
            await response.write(json.dumps({"type": "ADDED", "object": each}).encode() + b"\n")
        await self.closed.wait()
        return response

    def pod(self, index: int) -> dict[str, Any]:
        return {
            "metadata": {
                "uid": f"{index}",
                "name": f"pod-{index}",
                "labels": {"elastic.pytorch.org/index": f"{index}"},
            },
            "status": {"containerStatuses": [{"name": "worker", "state": {"running": {}}}]},
        }

    async def agent(self, request: web.BaseRequest) -> web.StreamResponse:
        """Be the agent of a pod, which returns its name, and waits until the launcher closes the connection."""
        rank = int(request.path.split("/")[-2][-1])
        async with contextlib.aclosing(self.opened(request)) as opened:
            async for socket in opened:
                await send(socket, {"type": "result", "rank": rank, "local_rank": 0}, pickle.dumps(f"pod-{rank}"))
                await ended(socket, ExitCode.SUCCEEDED)
                while (await socket.receive()).type is WSMsgType.BINARY:
                    pass
        return socket

    async def opened(self, request: web.BaseRequest) -> Any:
        """Yield the connection of an agent that has got a call."""
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        await send(socket, {"type": "hello", "version": __version__, "python": sys.version_info[:2]})
        data = b""
        while b"\xa4call" not in data:
            data += await socket.receive_bytes()
        self.calls.append(request.path.split("/")[-2])
        yield socket


async def send(socket: web.WebSocketResponse, message: dict[str, Any], content: bytes = b"") -> None:
    header = msgspec.msgpack.encode(message)
    await socket.send_bytes(b"\1" + SIZES.pack(len(header), len(content)) + header + content)


async def ended(socket: web.WebSocketResponse, code: ExitCode, **more: Any) -> None:
    await send(socket, {"type": "ended", "code": int(code), "message": "it failed", "world_size": 2, **more})


async def run(pods: Pods, launcher: Launcher, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launch on the pods; return the values by rank."""
    async with answering(pods.answer) as configuration:
        (path := folder / "kubeconfig").write_text(kubeconfig(configuration.host, token="", namespace="team"))
        monkeypatch.setenv("KUBECONFIG", f"{path}")
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        try:
            async with asyncio.timeout(30):
                return (await asyncio.to_thread(launcher.run, print, log_handlers=None)).by_ranks()
        finally:
            pods.closed.set()


async def refuse(_request: web.BaseRequest) -> web.StreamResponse:
    return web.json_response({"reason": "Forbidden", "message": "pods is forbidden"}, status=403)


async def test_a_launch_deletes_its_job_and_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = Pods()
    assert await run(pods, pods_launcher(workers=2, workers_per_host=1), tmp_path, monkeypatch) == ["pod-0", "pod-1"]
    assert f"DELETE {JOBS}/JOB" in pods.seen
    async with asyncio.timeout(10):
        while left := [each for each in threading.enumerate() if each.name.startswith("torchelastic")]:
            await asyncio.to_thread(left[0].join)


async def test_a_kept_job_remains_and_is_known_only_if_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods, launcher = Pods(), pods_launcher(workers=2, workers_per_host=1, keep=True)
    pods.answers[f"POST {JOBS}"] = refuse
    with pytest.raises(AgentFailedError, match="pods is forbidden"):
        await run(pods, launcher, tmp_path, monkeypatch)
    assert launcher.job is None
    del pods.answers[f"POST {JOBS}"]
    await run(pods, launcher, tmp_path, monkeypatch)
    assert launcher.job is not None
    assert f"DELETE {JOBS}/JOB" not in pods.seen


@pytest.mark.parametrize("path", [f"GET {PODS}", f"GET {JOBS}", f"GET {PODS}/pod-0/exec"])
async def test_a_missing_permission_is_named_at_once(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = Pods()
    pods.answers[path] = refuse
    with pytest.raises(
        AgentFailedError, match=r"^You may not use the pods of the ElasticJob kept: .*(pods/exec|pods is)"
    ):
        await run(pods, attach("kept"), tmp_path, monkeypatch)


@pytest.mark.parametrize("others", ["run", "have ended"])
async def test_a_launch_connects_again_if_a_connection_breaks(
    others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods, again, ended = Pods(), asyncio.Event(), asyncio.Event()

    async def lose(request: web.BaseRequest) -> web.StreamResponse:
        if "pod-1" not in pods.calls:
            async for socket in pods.opened(request):
                if others == "have ended":
                    await ended.wait()
                await socket.close()
                return socket
        again.set()
        return await pods.agent(request)

    async def other(request: web.BaseRequest) -> web.StreamResponse:
        if others == "run":
            await again.wait()
        response = await pods.agent(request)
        ended.set()
        return response

    pods.answers = {f"GET {PODS}/pod-0/exec": other, f"GET {PODS}/pod-1/exec": lose}
    assert await run(pods, pods_launcher(workers=2, workers_per_host=1), tmp_path, monkeypatch) == ["pod-0", "pod-1"]
    assert pods.calls.count("pod-1") == 2


async def test_a_result_that_does_not_arrive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchelastic.launcher.head._RECONNECT_TIMEOUT", 0.1)
    pods = Pods()
    pods.answers[f"GET {PODS}/pod-1/exec"] = lambda _: asyncio.sleep(0, web.json_response({}, status=404))
    with pytest.raises(AgentFailedError, match=r"^The agent of rank 1 was lost before the result "):
        await run(pods, pods_launcher(workers=2, workers_per_host=1), tmp_path, monkeypatch)


async def test_programs_wait_for_their_turn_at_the_first_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = Pods()
    busy: list[str] = []

    async def wait(request: web.BaseRequest) -> web.StreamResponse:
        busy.append(request.path)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        while (await socket.receive()).type is WSMsgType.BINARY:
            pass
        return socket

    pods.answers[f"GET {PODS}/pod-0/exec"] = wait
    with pytest.raises(AgentFailedError, match=r"within 1 s: another call may run in it\. Raise agent_timeout"):
        await run(pods, attach("kept", agent_timeout=1), tmp_path, monkeypatch)
    assert busy
    assert pods.calls == []


async def test_a_worker_that_has_failed_is_the_cause_if_another_pod_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods, failed = Pods(), asyncio.Event()

    async def fail(request: web.BaseRequest) -> web.StreamResponse:
        async for socket in pods.opened(request):
            await ended(socket, ExitCode.FAILED, rank=1, exit_code=3, own=True)
            failed.set()
        return socket

    async def hang(request: web.BaseRequest) -> web.StreamResponse:
        async for socket in pods.opened(request):
            while (await socket.receive()).type is WSMsgType.BINARY:
                pass
        return socket

    async def follow(request: web.BaseRequest) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response(pods.job)
        response = web.StreamResponse()
        await response.prepare(request)
        await failed.wait()
        status = {"conditions": [{"type": "Failed", "status": "True", "message": "the run has failed"}]}
        change = {"type": "MODIFIED", "object": {**pods.job, "status": status}}
        await response.write(json.dumps(change).encode() + b"\n")
        await pods.closed.wait()
        return response

    pods.answers = {f"GET {PODS}/pod-0/exec": hang, f"GET {PODS}/pod-1/exec": fail, f"GET {JOBS}": follow}
    with pytest.raises(Exception, match=r"^it failed$"):
        await run(pods, attach("kept"), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": ["train.py"]}, "the ElasticJob kept takes no calls"),
        ({"args": ["-m", CALLS_MODULE]}, "the ElasticJob kept takes no calls"),
        ({"nprocPerNode": 2}, "the ElasticJob kept has 2 workers per host, not 1"),
    ],
)
async def test_a_job_of_another_kind_is_not_taken_and_not_deleted(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = Pods()
    pods.job["spec"] |= change
    with pytest.raises(SettingsError, match=message):
        await run(pods, attach("kept", keep=False, workers_per_host=1), tmp_path, monkeypatch)
    assert f"DELETE {JOBS}/JOB" not in pods.seen


class Interrupted(BaseException):
    """What Ctrl-C raises."""


async def test_a_job_that_is_created_during_an_interrupt_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods, asked, interrupted = Pods(), threading.Event(), asyncio.Event()

    async def create(request: web.BaseRequest) -> web.StreamResponse:
        asked.set()
        await interrupted.wait()
        pods.job = {"metadata": {"name": (await request.json())["metadata"]["name"], "uid": "1"}}
        return web.json_response(pods.job)

    pods.answers[f"POST {JOBS}"] = create
    loop = asyncio.get_running_loop()

    def result(_self: object) -> None:
        asked.wait(30)
        loop.call_soon_threadsafe(interrupted.set)
        raise Interrupted

    monkeypatch.setattr("elastic_operator.launcher.kubernetes.Future.result", result)
    with pytest.raises(Interrupted):
        await run(pods, pods_launcher(), tmp_path, monkeypatch)
    assert pods.seen[-1] == f"DELETE {JOBS}/JOB"
