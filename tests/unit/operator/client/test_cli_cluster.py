"""``elasticjob`` on a cluster: which cluster it uses, what it shows, and its errors."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import pytest_asyncio
import yaml

from elastic_operator.api.constants import ANNOTATION_METRICS_PORT
from elastic_operator.cli import main as cli
from elastic_operator.client.cluster import view_of
from elastic_operator.kubernetes.client import ELASTIC_JOBS, PODS
from elastic_operator.views.formatting import description
from elastic_operator.views.top import MAX_PAGE
from tests.support.agent_pages import LEADS, agent_page
from tests.support.cluster_objects import JOB_UID, START, event, job, pod, terminated_state, timestamp
from tests.support.fake_api_server import FakeApiServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NOW = START + 72
JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/team/elasticjobs"
COMMANDS_ON_ONE = [
    *(["get", "digits"], ["describe", "digits"], ["logs", "digits"], ["top", "digits"], ["report", "digits"]),
    *(["scale", "digits", "--replicas", "2"], ["suspend", "digits"], ["resume", "digits"], ["delete", "digits"]),
]
EVERY_COMMAND = [["get"], ["top"], *COMMANDS_ON_ONE]


class Result(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one sentence that a command prints instead of an answer."""
        assert self.out == ""
        assert self.err.startswith("elasticjob: ")
        assert self.err.count("\n") == 1
        return self.err.removeprefix("elasticjob: ").strip()


class Terminal:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.flags: tuple[str, ...] = ()

    def type(self, *argv: str) -> Result:
        try:
            code = cli.main(argv)
        except SystemExit as end:
            code = int(end.code or 0)
        return Result(code, *self._capsys.readouterr())

    async def run(self, *argv: str) -> Result:
        """Run a command with the flags of the terminal while the event loop serves the test's server."""
        return await asyncio.to_thread(self.type, *argv, *self.flags)


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    """A terminal of a user without any configuration."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ELASTICJOB_HOME", str(tmp_path / "elasticjob"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    return Terminal(capsys)


@pytest_asyncio.fixture
async def server(terminal: Terminal, tmp_path: Path) -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as server:
        server.add(job())
        terminal.flags = ("--kubeconfig", str(server.kubeconfig(tmp_path)))
        yield server


# -- which cluster is used


async def test_only_a_flag_selects_a_cluster(
    server: FakeApiServer, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, kubeconfig), terminal.flags = terminal.flags, ()
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    assert "no jobs on this machine" in (await terminal.run("get")).err
    assert server.requests == []
    monkeypatch.setattr(
        sys, "platform", "darwin"
    )  # other systems cannot run jobs locally, but can list those on a cluster
    assert "Linux" in (await terminal.run("get")).sentence
    for flags in (["-n", "team"], ["--context", "test"], ["--kubeconfig", kubeconfig], ["-A"]):
        assert "digits" in (await terminal.run("get", *flags)).out


@pytest.mark.usefixtures("server")
async def test_the_kubeconfig_is_found_as_kubectl_finds_it(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, kubeconfig), terminal.flags = terminal.flags, ()
    other = tmp_path / "other"
    other.write_text(yaml.safe_dump({"contexts": [{"name": "there", "context": {"cluster": "test", "user": "test"}}]}))
    home = tmp_path / "home" / ".kube" / "config"
    home.parent.mkdir(parents=True)
    home.write_bytes((tmp_path / "kubeconfig").read_bytes())
    assert "digits" in (await terminal.run("get", "-n", "team")).out
    home.unlink()
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none:{kubeconfig}:{other}")
    assert "digits" in (await terminal.run("get", "--context", "there", "-n", "team")).out
    monkeypatch.setenv("KUBECONFIG", "~no-such-user/config")
    assert (await terminal.run("get", "-n", "team")).sentence == (
        "there is no kubeconfig (KUBECONFIG names ~no-such-user/config); name one with --kubeconfig"
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["get", "--all", "-A"], "--all is about the runs on this machine"),
        (["get", "digits", "-A"], "a job has one namespace"),
        (["top", "digits", "-A"], "a job has one namespace"),
        (["get", "-n", "a/b"], "invalid namespace 'a/b'"),
        (["get", "-n", ""], "invalid namespace ''"),
        (["delete", "digits", "--no-wait"], "--no-wait is for jobs on a cluster"),
        (["get", "-n", "team"], "there is no kubeconfig (~/.kube/config does not exist); name one with --kubeconfig"),
        (["get", "--kubeconfig", "/no/such"], "there is no kubeconfig /no/such; check the path"),
        (["get", "--kubeconfig", "~no-such-user/c"], "there is no kubeconfig ~no-such-user/c; check the path"),
    ],
)
def test_contradicting_or_invalid_flags_are_bad_input(argv: list[str], sentence: str, terminal: Terminal) -> None:
    result = terminal.type(*argv)
    assert (result.code, result.sentence[: len(sentence)]) == (2, sentence)


CONTEXT = {"name": "a", "context": {"cluster": "c", "user": "u"}}
CLUSTER = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
USER = {"name": "u", "user": {}}
VALID = {"current-context": "a", "contexts": [CONTEXT], "clusters": [CLUSTER], "users": [USER]}
NO_CERTIFICATE = {"name": "c", "cluster": {**CLUSTER["cluster"], "certificate-authority-data": "eA=="}}  # type: ignore[dict-item]
NO_PROGRAM = {"name": "u", "user": {"exec": {"command": "/no/such/program", "apiVersion": "v1"}}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [b", "cannot be used: while parsing"),
        ("\x00", "cannot be used"),
        ("[]", "cannot be used"),
        ("contexts: 5", "cannot be used"),
        ("a: b", "Expected key current-context in"),
        ({"current-context": "b", "contexts": [CONTEXT]}, "Expected object with name b in"),
        ({**VALID, "clusters": []}, "Expected object with name c in"),
        ({**VALID, "contexts": [{"name": "a", "context": 5}]}, "cannot be used"),
        ({**VALID, "clusters": [NO_CERTIFICATE]}, "the certificates for https://127.0.0.1:1 cannot be used"),
        ({**VALID, "users": [NO_PROGRAM]}, "gives no credentials: [Errno 2] No such file or directory: '/no/such/pro"),
    ],
)
def test_an_invalid_kubeconfig_is_reported_in_one_sentence(
    text: str | dict[str, Any], sentence: str, tmp_path: Path, terminal: Terminal
) -> None:
    path = tmp_path / "config"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    result = terminal.type("get", "--kubeconfig", str(path))
    assert result.code == 2
    assert sentence in result.sentence


@pytest.mark.parametrize("argv", EVERY_COMMAND, ids=" ".join)
def test_an_unreachable_api_server_is_reported_in_one_sentence(
    argv: list[str], tmp_path: Path, terminal: Terminal
) -> None:
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(VALID))
    result = terminal.type(*argv, "--kubeconfig", str(path))
    assert result.code == 1
    assert result.sentence.startswith("the API server cannot be reached: ")


def test_the_error_without_the_kubernetes_package_names_the_extra(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = ("kubernetes.", "elastic_operator.kubernetes.", "elastic_operator.client.")
    for name in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    result = terminal.type("get", "-n", "team")
    assert result.code == 1
    assert result.sentence.startswith("jobs on a cluster need the Python package kubernetes")
    assert "pip install '.[operator]'" in result.sentence


# -- errors of the API server


@pytest.mark.parametrize("argv", EVERY_COMMAND, ids=" ".join)
async def test_an_api_server_error_is_printed_as_one_sentence(
    server: FakeApiServer, terminal: Terminal, argv: list[str]
) -> None:
    for status, words, sentence in (
        (401, "Unauthorized", "the API server does not accept these credentials"),
        (403, 'User "ada" cannot list', 'you may not do this on this cluster: User "ada" cannot list'),
        (500, "etcd is away", "the API server refused (500 InternalError): etcd is away"),
    ):
        server.failing = {JOBS: (status, words), f"{JOBS}/digits": (status, words)}
        result = await terminal.run(*argv)
        assert result.code == 1
        assert result.sentence.startswith(sentence)


async def test_a_missing_job_is_reported_in_one_sentence(server: FakeApiServer, terminal: Terminal) -> None:
    server.remove(JOB_UID)
    for argv in COMMANDS_ON_ONE:
        result = await terminal.run(*argv)
        assert result.code == 1
        assert result.sentence.startswith("there is no job digits in the namespace team; `elasticjob get` ")
    for command in ("get", "top"):
        assert (await terminal.run(command)).sentence.startswith("no jobs in the namespace team; ")
        assert (await terminal.run(command, "-A")).sentence.startswith("no jobs in any namespace; ")


@pytest.mark.parametrize("argv", COMMANDS_ON_ONE[5:8], ids=" ".join)
async def test_a_finished_job_cannot_be_changed(server: FakeApiServer, terminal: Terminal, argv: list[str]) -> None:
    server.add(job(status={"state": "Succeeded"}))
    result = await terminal.run(*argv)
    assert (result.code, result.sentence) == (2, "the job digits has ended (Succeeded) and can no longer be changed")


async def test_delete_returns_when_the_jobs_own_pods_are_deleted(server: FakeApiServer, terminal: Terminal) -> None:
    namesake = pod(1, "bbbbb")
    namesake["metadata"]["ownerReferences"][0]["uid"] = "another job of the same name"
    server.add(namesake)
    server.add(pod(0, "aaaaa"))
    deleting = asyncio.create_task(terminal.run("delete", "digits"))
    await server.wait_for(lambda: server.count_requests("GET", PODS) > 0)
    assert server.count_requests("DELETE", ELASTIC_JOBS) == 1
    assert not deleting.done()
    server.remove("uid-aaaaa")
    assert await deleting == (0, "elasticjob digits deleted\n", "")
    server.add(job())
    server.add(pod(0, "aaaaa"))
    assert (await terminal.run("delete", "digits", "--no-wait")).code == 0


@pytest.mark.parametrize(
    ("argv", "spec", "output"),
    [
        (["scale", "digits", "--replicas", "2"], {"replicas": 2}, "scaled to 2"),
        (["suspend", "digits"], {"suspend": True}, "suspended"),
        (["resume", "digits"], {"suspend": False}, "resumed"),
    ],
    ids=["scale", "suspend", "resume"],
)
async def test_a_job_is_changed(
    server: FakeApiServer, terminal: Terminal, argv: list[str], spec: dict[str, Any], output: str
) -> None:
    assert (await terminal.run(*argv)).out == f"elasticjob digits {output}\n"
    assert server.get(ELASTIC_JOBS, "digits")["spec"].items() >= spec.items()


# -- get and describe


def serving(index: int, suffix: str, **status: Any) -> dict[str, Any]:
    """Return a pod whose agent serves metrics."""
    made = pod(index, suffix, **status)
    made["metadata"]["annotations"] = {ANNOTATION_METRICS_PORT: "9464"}
    return made


def test_a_description_has_pods_events_and_conditions() -> None:
    words = '{"reason":"StoreUnavailable","message":"etcd does not answer","protocol":1}'
    pods = [
        pod(0, "aaaaa"),
        pod(1, "bbbbb", state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}),
        pod(2, "ccccc", state=terminated_state(3, words)),
    ]
    events = [event(50, "later\nin two lines", type="Warning", count=3), event(3, "training started with 3 pods")]
    lines = description(view_of(job(), pods, events), NOW)
    assert not any(line.startswith(("Run:", "Logs:", "Manifest:")) for line in lines)
    assert {
        "Namespace:     team",
        "State:         Running",
        "Pods:          3 desired, 3 current, 2 ready",
        "Round:         4, world size 2",
        "Last Failure:  rank 1 on digits-1-bbbbb was killed by SIGKILL",
        "  maxReplicas: 3",
        "  Running   True     1m08s   Training   2 workers train in round 4.",
    } <= {*lines}
    first, second, third = (lines.index(f"  digits-{each}") for each in ("0-aaaaa", "1-bbbbb", "2-ccccc"))
    assert lines[first + 1 : second] == [
        "    State:  running",
        "    Age:    1m11s",
        "    Node:   node-a (pod address 10.1.0.0)",
    ]
    assert lines[second + 1] == "    State:  starting"
    assert lines[second + 4] == (
        "    Note:   the image elastic-agent:dev cannot be pulled (is it on the nodes?): no such image"
    )
    assert {"    State:    failed (3)", "    Message:  etcd does not answer"} <= {*lines[third:]}
    assert lines[-2:] == [
        "  Normal    1m09s   Round    training started with 3 pods",
        "  Warning   22s     Round    later in two lines (3 times)",
    ]


@pytest.mark.parametrize(
    ("observed", "words"),
    [(None, "no operator has handled it yet"), (1, "the operator has not seen the latest change")],
)
def test_a_status_older_than_the_spec_is_marked(observed: int | None, words: str) -> None:
    changed = job(status=None if observed is None else {"observedGeneration": observed})
    changed["metadata"]["generation"] = 2
    [state] = [line for line in description(view_of(changed), NOW) if line.startswith("State:")]
    assert words in state


async def test_a_description_omits_objects_that_the_user_may_not_read(
    server: FakeApiServer, terminal: Terminal
) -> None:
    server.failing = {f"/api/v1/namespaces/team/{what}": (403, "no") for what in ("pods", "events")}
    code, out, err = await terminal.run("describe", "digits")
    assert (code, "Name:          digits\n" in out) == (0, True)
    assert err.splitlines() == [
        f"elasticjob: you may not see the {what} of this namespace, so none are shown" for what in ("pods", "events")
    ]


# -- top and report


def proxied(name: str, port: int = 9464) -> str:
    return f"/api/v1/namespaces/team/pods/{name}:{port}/proxy/metrics"


async def test_metrics_are_read_through_the_api_server(server: FakeApiServer, terminal: Terminal) -> None:
    for made in (serving(0, "aaaaa"), serving(1, "bbbbb"), pod(2, "ccccc"), serving(2, "ddddd"), serving(2, "large")):
        server.add(made)
    server.pages[proxied("digits-2-large")] = agent_page(1) + "# x\n" * (MAX_PAGE // 4)
    server.pages[proxied("digits-0-aaaaa")] = agent_page(0, seconds=LEADS, lost=0.0, steps=(2.0, 100))
    server.failing[proxied("digits-1-bbbbb")] = (503, "error trying to reach service: dial tcp: connection refused")
    server.pages[proxied("digits-2-ddddd")] = agent_page(1, steps=(2.0, 100))
    header, line = (await terminal.run("top", "-A")).out.splitlines()
    assert header.split()[0] == "NAMESPACE"
    assert line.split()[-8:-3] == ["3", "2", "90.0", "%", "0s"]
    lines = (await terminal.run("top", "digits")).out.splitlines()
    assert lines[0].startswith("digits  Running  ")
    assert "goodput 90.0 %   lost 0s" in lines
    assert [line.split()[:3] for line in lines if line.startswith(("0 ", "1 "))] == [
        ["0", "digits-0-aaaaa", "20ms"],
        ["1", "digits-2-ddddd", "20ms"],
    ]
    assert lines[-3:] == [
        "digits-2-ccccc has not announced the port of its metrics yet",
        "digits-1-bbbbb: its agent does not answer (error trying to reach service: dial tcp: connection refused)",
        "digits-2-large: its response to a request for /metrics is too large",
    ]


async def test_without_permission_to_read_metrics_the_status_is_shown(
    server: FakeApiServer, terminal: Terminal
) -> None:
    before = {"asOf": timestamp(20), "seconds": {"training": 5.0, "suspended": 15.0}}
    server.add(job(status={"timeBreakdown": before}))
    for index, suffix in enumerate(("aaaaa", "bbbbb")):
        server.add(serving(index, suffix))
        name = f"digits-{index}-{suffix}"
        server.failing[proxied(name)] = (403, f'pods "{name}" is forbidden')
    lines = (await terminal.run("top", "digits")).out.splitlines()
    assert "round 4   world size 2   pods ready 2/3   restarts 1 charged, 0 uncharged" in lines
    assert not [line for line in lines if "goodput" in line], "the time breakdown is from before the job was resumed"
    assert lines[-1] == (
        "digits-0-aaaaa and 1 more pod: its metrics cannot be read; grant yourself `get` on pods/proxy, "
        "unless the pod itself refuses"
    )


def kept(text: str, *, uid: str = JOB_UID) -> dict[str, Any]:
    """Return a ConfigMap with a report."""
    owner = {"kind": "ElasticJob", "name": "digits", "uid": uid, "controller": True}
    about = {"name": "digits-report", "namespace": "team", "uid": "uid-report", "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"report.json": text}}


async def test_a_missing_report_is_explained(server: FakeApiServer, terminal: Terminal) -> None:
    result = await terminal.run("report", "digits")
    assert result.code == 1
    assert result.sentence.startswith(
        "the job digits is still Running: its report is written when it has ended or is suspended; "
    )
    server.add(job(status={"state": "Succeeded"}))
    for _ in range(2):
        result = await terminal.run("report", "digits")
        assert result.code == 1
        assert result.sentence.startswith("the job digits has ended without a report")
        server.add(kept("{}", uid="another job of the same name"))
