"""``elasticjob`` and clusters: which one is meant, what is shown of its jobs, and what is said where that cannot be."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml

from elastic_operator import cli
from elastic_operator.commands.describe import description
from elastic_operator.commands.get import table
from elastic_operator.kube.snapshot import snapshot_of
from elastic_operator.names import ANNOTATION_METRICS_PORT
from elastic_operator.report_json import encode_report
from elastic_operator.showing.asking import LARGEST_PAGE
from elastic_operator.showing.report_page import page
from elastic_operator.showing.shown import Shown
from tests.support.agent_pages import LEADS, agent_page
from tests.support.api_stand_in import ApiStandIn
from tests.support.cluster_objects import JOB_UID, START, at, died, event, job, pod
from tests.support.reports import report

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NOW = START + 72
JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/team/elasticjobs"
EVERY_COMMAND = [
    ["get"],
    ["top"],
    ["get", "digits"],
    ["describe", "digits"],
    ["logs", "digits"],
    ["top", "digits"],
    ["report", "digits"],
    ["scale", "digits", "--replicas", "2"],
    ["suspend", "digits"],
    ["resume", "digits"],
    ["delete", "digits"],
]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiStandIn]:
    async with ApiStandIn() as server:
        await server.put("ElasticJob", job())
        yield server


@pytest.fixture
def kubeconfig(server: ApiStandIn, tmp_path: Path) -> str:
    return str(server.kubeconfig(tmp_path))


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ELASTICJOB_HOME", str(tmp_path / "elasticjob"))
    monkeypatch.delenv("KUBECONFIG", raising=False)


def run(*argv: str) -> int:
    try:
        return cli.main(argv)
    except SystemExit as end:
        return int(end.code or 0)


async def type_in(*argv: str) -> int:
    """Run a command while the server of the test serves."""
    return await asyncio.to_thread(run, *argv)


def the_one_sentence(captured: Any) -> str:
    """What was said instead of an answer."""
    assert captured.out == ""
    assert captured.err.startswith("elasticjob: ")
    assert captured.err.count("\n") == 1
    return str(captured.err.removeprefix("elasticjob: ").strip())


# -- which cluster is meant


@pytest.mark.parametrize(
    "command", ["get", "describe", "logs", "top", "report", "scale", "suspend", "resume", "delete"]
)
def test_the_flags_that_lead_to_a_cluster_are_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    for flag in ("--namespace", "--context", "--kubeconfig"):
        assert flag in text
    assert f"elasticjob {command} " in text
    assert " -n team" in text
    assert ("--all-namespaces" in text) == (command in ("get", "top"))


async def test_only_a_word_on_the_command_line_leads_to_a_cluster(
    server: ApiStandIn, kubeconfig: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    assert await type_in("get") == 0
    assert "no jobs here" in capsys.readouterr().err
    assert server.requests == []
    for words in (["-n", "team"], ["--context", "here"], ["--kubeconfig", kubeconfig], ["-A"]):
        assert await type_in("get", *words) == 0
        assert "digits" in capsys.readouterr().out


async def test_of_several_files_in_kubeconfig_those_that_are_there_count(
    kubeconfig: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.write_text(yaml.safe_dump({"contexts": [{"name": "there", "context": {"cluster": "here", "user": "me"}}]}))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none:{kubeconfig}:{other}")
    assert await type_in("get", "--context", "there", "-n", "team") == 0
    assert "digits" in capsys.readouterr().out


async def test_the_file_in_the_home_folder_is_the_last_resort(
    kubeconfig: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "home" / ".kube" / "config"
    there.parent.mkdir(parents=True)
    there.write_bytes((tmp_path / "kubeconfig").read_bytes())
    assert await type_in("get", "-n", "team") == 0
    assert "digits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["get", "--all", "-A"], "--all is about the runs on this machine"),
        (["get", "digits", "-A"], "a job has one namespace"),
        (["get", "-n", "a/b"], "there can be no namespace 'a/b'"),
        (["get", "-n", ""], "there can be no namespace ''"),
        (["delete", "digits", "--no-wait"], "--no-wait is for jobs on a cluster"),
        (["get", "-n", "team"], "there is no kubeconfig (~/.kube/config is not there); name one with --kubeconfig"),
        (["get", "--kubeconfig", "/no/such"], "there is no kubeconfig /no/such; check the path"),
    ],
)
def test_what_cannot_be_meant_is_bad_input(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert the_one_sentence(capsys.readouterr()).startswith(sentence)


CONTEXT = {"name": "a", "context": {"cluster": "c", "user": "u"}}
CLUSTER = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
USER = {"name": "u", "user": {}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [b", "is no YAML in line 1; correct it"),
        ("\x00", "is no YAML"),
        ("[]", "is no kubeconfig"),
        ("a: b", "has no current context; choose one with --context (there are: none)"),
        ({"current-context": "b", "contexts": [CONTEXT]}, "has no context b; choose another with --context"),
        ({"current-context": "a", "contexts": [CONTEXT]}, "has no cluster c, which its context a names"),
        ({"current-context": "a", "contexts": [CONTEXT], "clusters": [CLUSTER]}, "has no user u, which its context"),
        (
            {
                "current-context": "a",
                "contexts": [CONTEXT],
                "clusters": [{"name": "c", "cluster": {**CLUSTER["cluster"], "certificate-authority-data": "eA=="}}],
                "users": [USER],
            },
            "the certificates of the kubeconfig cannot be used",
        ),
        (
            {
                "current-context": "a",
                "contexts": [CONTEXT],
                "clusters": [CLUSTER],
                "users": [{"name": "u", "user": {"exec": {"command": "/no/such/program", "apiVersion": "v1"}}}],
            },
            "gives no credentials: [Errno 2] No such file or directory: '/no/such/program'",
        ),
        (
            {
                "current-context": "a",
                "contexts": [CONTEXT],
                "clusters": [{"name": "c", "cluster": {}}],
                "users": [USER],
            },
            "has no server (https://…) for the cluster c",
        ),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_called_what_it_is(
    text: str | dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    assert run("get", "--kubeconfig", str(path)) == 2
    assert sentence in the_one_sentence(capsys.readouterr())


@pytest.mark.parametrize("argv", EVERY_COMMAND)
def test_an_api_server_that_is_not_there_gets_a_sentence(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    config = {"current-context": "a", "contexts": [CONTEXT], "clusters": [CLUSTER], "users": [USER]}
    path.write_text(yaml.safe_dump(config))
    assert run(*argv, "--kubeconfig", str(path)) == 1
    assert the_one_sentence(capsys.readouterr()).startswith("the API server cannot be reached: ")


def test_without_the_kubernetes_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("kubernetes.", "elastic_operator.kube."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert run("get", "-n", "team") == 1
    said = the_one_sentence(capsys.readouterr())
    assert said.startswith("jobs on a cluster need the Python package kubernetes")
    assert "pip install '.[operator]'" in said


async def test_a_cluster_can_be_asked_from_any_system(
    kubeconfig: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert await type_in("get", "--kubeconfig", kubeconfig) == 0
    assert "digits" in capsys.readouterr().out


# -- what the API server refuses


@pytest.mark.parametrize("argv", EVERY_COMMAND)
@pytest.mark.parametrize(
    ("status", "words", "sentence"),
    [
        (401, "Unauthorized", "the API server does not accept these credentials"),
        (403, 'User "ada" cannot list', 'you may not do this on this cluster: User "ada" cannot list'),
        (500, "etcd is away", "the API server refused (500 InternalError): etcd is away"),
    ],
)
async def test_refusals_are_said_in_a_sentence(
    server: ApiStandIn,
    kubeconfig: str,
    argv: list[str],
    status: int,
    words: str,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.failing = {JOBS: (status, words), f"{JOBS}/digits": (status, words)}
    assert await type_in(*argv, "--kubeconfig", kubeconfig) == 1
    assert the_one_sentence(capsys.readouterr()).startswith(sentence)


async def test_a_server_that_has_too_much_to_do_is_asked_again(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failing = {JOBS: (429, "storage is (re)initializing")}
    asking = asyncio.create_task(type_in("get", "--kubeconfig", kubeconfig))
    await asyncio.wait_for(server.asked.wait(), 20)
    server.failing = {}
    assert await asking == 0
    assert "digits" in capsys.readouterr().out
    assert len(server.requests) == 2


@pytest.mark.parametrize("argv", EVERY_COMMAND[2:])
async def test_a_job_that_is_not_there_gets_a_sentence(
    server: ApiStandIn, kubeconfig: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    await server.remove("ElasticJob", job()["metadata"]["uid"])
    assert await type_in(*argv, "--kubeconfig", kubeconfig) == 1
    said = the_one_sentence(capsys.readouterr())
    assert said.startswith("there is no job digits in the namespace team; `elasticjob get` ")


async def test_no_jobs_is_said_where_there_are_none(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await server.remove("ElasticJob", job()["metadata"]["uid"])
    assert await type_in("get", "--kubeconfig", kubeconfig) == 0
    assert the_one_sentence(capsys.readouterr()).startswith("no jobs in the namespace team; ")
    assert await type_in("get", "-A", "--kubeconfig", kubeconfig) == 0
    assert the_one_sentence(capsys.readouterr()).startswith("no jobs in any namespace; ")


@pytest.mark.parametrize(
    "argv", [["scale", "digits", "--replicas", "2"], ["suspend", "digits"], ["resume", "digits"]], ids=" ".join
)
async def test_a_job_that_is_over_does_not_change(
    server: ApiStandIn, kubeconfig: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    await server.put("ElasticJob", job(status={"state": "Succeeded"}))
    assert await type_in(*argv, "--kubeconfig", kubeconfig) == 2
    assert the_one_sentence(capsys.readouterr()) == "the job digits is over (Succeeded) and does not change any more"


# -- what is shown


async def test_objects_are_given_as_kubectl_gives_them(kubeconfig: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await type_in("get", "digits", "-o", "json", "--kubeconfig", kubeconfig) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["kind"], one["metadata"]["name"], one["status"]["state"]) == ("ElasticJob", "digits", "Running")
    assert "managedFields" not in one["metadata"]
    assert await type_in("get", "-o", "yaml", "--kubeconfig", kubeconfig) == 0
    every = yaml.safe_load(capsys.readouterr().out)
    assert (every["kind"], every["items"]) == ("List", [one])


def test_jobs_are_listed_in_the_columns_of_kubectl() -> None:
    jobs = [Shown.of(snapshot_of(each)) for each in (job(), job("waits", status=None))]
    header, first, second = table(jobs, NOW, namespaces=True)
    assert header.split() == ["NAMESPACE", "NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE"]
    assert first.split() == ["team", "digits", "Running", "2/3", "2", "3", "1", "1m12s"]
    assert second.split() == ["team", "waits", "Pending", "0/0", "2", "3", "0", "1m12s"]
    assert table(jobs, NOW, wide=True)[0].split()[-3:] == ["AGE", "EPOCH", "WORLD"]


async def test_a_wide_list_says_where_agents_show_metrics(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serves = pod(0, "aaaaa", podIP="10.1.2.3")
    serves["metadata"]["annotations"] = {ANNOTATION_METRICS_PORT: "9464"}
    await server.put("Pod", serves)
    for command in (["get"], ["get", "digits"], ["get", "-A"]):
        assert await type_in(*command, "-o", "wide", "--kubeconfig", kubeconfig) == 0
        header, line = capsys.readouterr().out.splitlines()
        assert (header.split()[-1], line.split()[-1]) == ("METRICS", "10.1.2.3:9464")


def test_a_description_says_all_that_is_known() -> None:
    words = '{"reason":"StoreUnavailable","message":"etcd does not answer","contract":1}'
    pods = [
        pod(0, "aaaaa"),
        pod(1, "bbbbb", state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}),
        pod(2, "ccccc", state=died(3, words)),
    ]
    events = [event(50, "later\nin two lines", type="Warning", count=3), event(3, "training started with 3 pods")]
    etcd = {"endpoint": "10.96.0.7:2379", "state": "service digits-etcd, ready"}
    lines = description(Shown.of(snapshot_of(job(), pods, events, etcd)), NOW)
    assert "Namespace:     team" in lines
    assert not any(line.startswith(("Run:", "Logs:", "Manifest:")) for line in lines)
    assert "State:         Running" in lines
    assert "Pods:          2 ready of 3 wanted, 3 there" in lines
    assert "Epoch:         4, world size 2" in lines
    assert "Last Failure:  rank 1 on digits-1-bbbbb was killed by SIGKILL" in lines
    assert "Etcd:          10.96.0.7:2379 (service digits-etcd, ready)" in lines
    assert "  maxReplicas: 3" in lines
    assert "  Running   True     1m08s   Training   2 workers train in epoch 4." in lines
    first, second, third = (lines.index(f"  digits-{each}") for each in ("0-aaaaa", "1-bbbbb", "2-ccccc"))
    assert lines[first + 1 : second] == [
        "    State:  running",
        "    Age:    1m11s",
        "    Node:   node-a (pod address 10.1.0.0)",
    ]
    assert lines[second + 1] == "    State:  starting"
    assert (
        lines[second + 4]
        == "    Note:   the image elastic-agent:dev cannot be pulled (is it on the nodes?): no such image"
    )
    assert "    State:       failed (3)" in lines[third:]
    assert "    Last Words:  etcd does not answer" in lines[third:]
    assert lines[-2:] == [
        "  Normal    1m09s   Epoch    training started with 3 pods",
        "  Warning   22s     Epoch    later in two lines (3 times)",
    ]


@pytest.mark.parametrize(
    ("seen", "words"),
    [(None, "no operator has taken it up yet"), (1, "the operator has not seen the latest change")],
)
def test_a_status_that_is_behind_the_spec_is_called_that(seen: int | None, words: str) -> None:
    changed = job(status=None if seen is None else {"observedGeneration": seen})
    changed["metadata"]["generation"] = 2
    [state] = [line for line in description(Shown.of(snapshot_of(changed)), NOW) if line.startswith("State:")]
    assert words in state


async def test_what_one_may_not_see_is_said_and_the_rest_described(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failing = {
        f"/api/v1/namespaces/team/{what}": (403, "no") for what in ("pods", "events", "services/digits-etcd")
    }
    assert await type_in("describe", "digits", "--kubeconfig", kubeconfig) == 0
    captured = capsys.readouterr()
    assert "Name:          digits\n" in captured.out
    assert captured.err.splitlines() == [
        f"elasticjob: you may not see the {what} of this namespace, so none are shown" for what in ("pods", "events")
    ]


async def test_logs_are_printed_and_followed_to_the_end(
    server: ApiStandIn, kubeconfig: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    await server.put("Pod", pod(0, "aaaaa"))
    await server.print("digits-0-aaaaa", "[rank 0] test accuracy 0.9\n")
    assert await type_in("logs", "digits", "--kubeconfig", kubeconfig) == 0
    assert capfdbinary.readouterr().out == b"[rank 0 on digits-0-aaaaa] test accuracy 0.9\n"
    following = asyncio.create_task(type_in("logs", "digits", "--rank", "0", "-f", "--kubeconfig", kubeconfig))
    await server.followed("digits-0-aaaaa")
    await server.print("digits-0-aaaaa", "[rank 0] done\n")
    await server.end("digits-0-aaaaa")
    await server.put("Pod", pod(0, "aaaaa", state=died(0, "")))
    await server.put("ElasticJob", job(status={"state": "Succeeded"}))
    assert await asyncio.wait_for(following, 20) == 0
    assert capfdbinary.readouterr().out == b"test accuracy 0.9\ndone\n"


async def test_workers_that_have_printed_nothing_are_called_that(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await server.put("Pod", pod(0, "aaaaa"))
    await server.print("digits-0-aaaaa", "10:15:02 [digits-0-aaaaa] epoch 1: started rank 0 of a world of 1\n")
    assert await type_in("logs", "digits", "--kubeconfig", kubeconfig) == 0
    assert the_one_sentence(capsys.readouterr()).startswith("these workers have printed nothing; ")


async def test_logs_that_cannot_be_read_give_an_exit_code(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await server.put("Pod", pod(0, "aaaaa"))
    server.failing = {"/api/v1/namespaces/team/pods/digits-0-aaaaa/log": (500, "the kubelet does not answer")}
    assert await type_in("logs", "digits", "--kubeconfig", kubeconfig) == 1
    assert the_one_sentence(capsys.readouterr()).endswith("cannot be read: the kubelet does not answer")
    server.failing = {"/api/v1/namespaces/team/pods/digits-0-aaaaa/log": (403, "you may not")}
    assert await type_in("logs", "digits", "--kubeconfig", kubeconfig) == 1
    assert the_one_sentence(capsys.readouterr()).endswith("you may not")


# -- how a job trains, and its report


def serving(index: int, suffix: str) -> dict[str, Any]:
    """A pod whose agent serves metrics."""
    made = pod(index, suffix)
    made["metadata"]["annotations"] = {ANNOTATION_METRICS_PORT: "9464"}
    return made


def proxied(name: str, port: int = 9464) -> str:
    return f"/api/v1/namespaces/team/pods/{name}:{port}/proxy/metrics"


async def test_the_agents_of_a_job_are_asked_through_the_api_server(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for made in (serving(0, "aaaaa"), serving(1, "bbbbb"), pod(2, "ccccc"), serving(2, "ddddd")):
        await server.put("Pod", made)
    server.pages[proxied("digits-0-aaaaa")] = agent_page(0, seconds=LEADS, steps=(2.0, 100))
    server.failing[proxied("digits-1-bbbbb")] = (503, "error trying to reach service: dial tcp: connection refused")
    server.pages[proxied("digits-2-ddddd")] = agent_page(1, steps=(2.0, 100))
    assert await type_in("top", "digits", "--kubeconfig", kubeconfig) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("digits  Running  ")
    assert "goodput 90.0 %" in lines
    assert [line.split()[:3] for line in lines if line.startswith(("0 ", "1 "))] == [
        ["0", "digits-0-aaaaa", "20ms"],
        ["1", "digits-2-ddddd", "20ms"],
    ]
    assert lines[-2:] == [
        "digits-2-ccccc does not say yet on which port its metrics are",
        "digits-1-bbbbb: its agent does not answer (error trying to reach service: dial tcp: connection refused)",
    ]


async def test_a_pod_that_names_no_port_or_no_address_is_told_of_and_hides_no_other(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    no_port, no_address = serving(0, "aaaaa"), serving(1, "bbbbb")
    no_port["metadata"]["annotations"][ANNOTATION_METRICS_PORT] = "99999"
    no_address["status"]["podIP"] = "10.0.0.1]"
    for made in (no_port, no_address, serving(2, "ccccc")):
        await server.put("Pod", made)
    server.pages[proxied("digits-2-ccccc")] = agent_page(0, seconds=LEADS)
    assert await type_in("top", "digits", "--kubeconfig", kubeconfig) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "goodput 90.0 %" in lines
    assert lines[-2:] == [
        "digits-0-aaaaa does not say yet on which port its metrics are",
        "digits-1-bbbbb: http://10.0.0.1]:9464/metrics is no address of an agent (Invalid IPv6 URL)",
    ]
    assert await type_in("top", "--kubeconfig", kubeconfig) == 0
    assert " 90.0 % " in capsys.readouterr().out


async def test_a_page_of_metrics_that_is_too_large_is_told_of_and_hides_no_other(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for made in (serving(0, "aaaaa"), serving(1, "bbbbb")):
        await server.put("Pod", made)
    server.pages[proxied("digits-0-aaaaa")] = agent_page(0, seconds=LEADS)
    server.pages[proxied("digits-1-bbbbb")] = agent_page(1) + "# x\n" * (LARGEST_PAGE // 4)
    assert await type_in("top", "digits", "--kubeconfig", kubeconfig) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "goodput 90.0 %" in lines
    assert lines[-1] == "digits-1-bbbbb: what it serves under /metrics is too large"


@pytest.mark.parametrize("words", [["--kubeconfig"], ["-A", "--kubeconfig"]])
async def test_all_jobs_of_a_cluster_have_a_line_with_what_their_leader_tells(
    words: list[str], server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await server.put("Pod", serving(0, "aaaaa"))
    server.pages[proxied("digits-0-aaaaa")] = agent_page(0, seconds=LEADS)
    assert await type_in("top", *words, kubeconfig) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[0] == ("NAMESPACE" if "-A" in words else "NAME")
    assert line.split()[-8:-3] == ["3", "2", "90.0", "%", "-"]


async def test_whoever_may_not_ask_the_agents_is_told_once_and_sees_the_status(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {"asOf": at(20), "seconds": {"training": 5.0, "suspended": 15.0}}
    await server.put("ElasticJob", job(status={"timeSplit": before}))
    for index, suffix in enumerate(("aaaaa", "bbbbb")):
        await server.put("Pod", serving(index, suffix))
        name = f"digits-{index}-{suffix}"
        server.failing[proxied(name)] = (403, f'pods "{name}" is forbidden')
    assert await type_in("top", "digits", "--kubeconfig", kubeconfig) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "epoch 4   world size 2   pods ready 2/3   restarts 1 charged, 0 free" in lines
    assert not [line for line in lines if "goodput" in line], "that was before it was resumed"
    [said] = [line for line in lines if "forbidden" in line]
    assert said == (
        'what the agents tell may not be read (pods "digits-0-aaaaa" is forbidden); it takes the right to get '
        "pods/proxy, or the pod itself refuses"
    )


def kept(text: str, *, uid: str = JOB_UID) -> dict[str, Any]:
    """The ConfigMap with a report."""
    owner = {"kind": "ElasticJob", "name": "digits", "uid": uid, "controller": True}
    about = {"name": "digits-report", "namespace": "team", "uid": "uid-report", "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"report.json": text}}


async def test_the_report_of_a_job_is_made_of_what_the_operator_has_kept(
    server: ApiStandIn, kubeconfig: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await server.put("ConfigMap", kept(encode_report(report()).decode()))
    file = tmp_path / "a.html"
    assert await type_in("report", "digits", "-o", str(file), "--kubeconfig", kubeconfig) == 0
    assert capsys.readouterr().out == f"the report of digits is in {file}\n"
    assert file.read_text() == page(report())


async def test_of_a_job_that_goes_on_there_is_no_report_yet(
    server: ApiStandIn, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await type_in("report", "digits", "--kubeconfig", kubeconfig) == 1
    said = the_one_sentence(capsys.readouterr())
    assert said.startswith("the job digits is still Running: its report is kept when it has ended, or rests; ")
    await server.put("ElasticJob", job(status={"state": "Succeeded"}))
    for of in (None, "another job of the same name"):
        if of:
            await server.put("ConfigMap", kept("{}", uid=of))
        assert await type_in("report", "digits", "--kubeconfig", kubeconfig) == 1
        assert the_one_sentence(capsys.readouterr()).startswith(
            "no report of the job digits is kept, though it is over"
        )
