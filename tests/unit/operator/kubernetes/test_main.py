"""The command ``elastic-operator``: its flags, its connection and its log."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from elastic_operator.kubernetes.main import JsonLines, TextLines, main, parse
from elastic_operator.kubernetes.settings import OperatorSettings
from elastic_operator.resources.owned_objects import PodSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "POD_NAME": "operator-0", "POD_NAMESPACE": "elastic-system"}


def test_without_flags_all_namespaces_are_watched_and_a_leader_is_elected() -> None:
    settings = parse([], IN_A_POD)
    pods = PodSettings(operator_namespace="elastic-system")
    assert settings == OperatorSettings(identity="operator-0", lease_namespace="elastic-system", in_pod=True, pods=pods)
    assert settings.namespaces == ()
    assert settings.leader_elect
    assert settings.listen == ("0.0.0.0", 8080)


def test_every_flag_becomes_a_setting() -> None:
    settings = parse(
        [
            "--namespace=a", "--namespace=b", "--namespace=a", "--etcd-image=my/etcd:1", "--agent-metrics-port=0",
            "--listen=[::1]:9", "--no-leader-elect", "--lease-namespace=c", "--lease-name=d", "--kubeconfig=/e",
            "--context=f", "--log-format=json", "--log-level=warning", "--etcd-secrets-namespace=g",
            "--etcd-secrets-namespace=h", "--etcd-secrets-namespace=g", "--no-network-policies",
            "--metrics-namespace=monitoring", "--metrics-namespace=monitoring",
            "--etcd-endpoints=10.0.0.0/8", "--etcd-endpoints=.svc",
        ],
        IN_A_POD,
    )  # fmt: skip
    assert settings == OperatorSettings(
        namespaces=("a", "b"),
        etcd_secrets_namespaces=("g", "h"),
        etcd_endpoints=("10.0.0.0/8", ".svc"),
        pods=PodSettings(
            etcd_image="my/etcd:1",
            agent_metrics_port=0,
            network_policies=False,
            metrics_namespaces=("monitoring",),
            operator_namespace="elastic-system",
        ),
        listen=("::1", 9),
        leader_elect=False,
        lease_namespace="c",
        lease_name="d",
        kubeconfig="/e",
        context="f",
        log_format="json",
        log_level="warning",
        identity="operator-0",
        in_pod=False,
    )


def test_outside_of_a_pod_two_processes_have_different_names() -> None:
    one, other = parse(["--context=test"], {}), parse(["--context=test"], {})
    assert one.identity != other.identity
    assert not one.in_pod
    assert (one.lease_namespace, one.pods.operator_namespace) == (None, None)


def test_outside_of_a_pod_a_cluster_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([], {"KUBECONFIG": "/production"})
    assert "name a cluster with --context or --kubeconfig" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--namespace=Team", "'Team' is not a valid namespace: at most 63 lowercase letters, digits and dashes"),
        ("--agent-metrics-port=70000", "'70000' is not a valid port: a number from 0 to 65535"),
        ("--lease-name=", "'' is not a valid name: lowercase letters, digits, dashes and dots"),
        ("--listen=8080", "'8080' is not HOST:PORT, such as 0.0.0.0:8080 or [::]:8080"),
        ("--listen=::1:8080", "'::1:8080' is not HOST:PORT, such as 0.0.0.0:8080 or [::]:8080"),
        ("--log-level=loud", "invalid choice: 'loud'"),
        ("--name", "unrecognized arguments: --name"),
    ],
)
def test_an_invalid_flag_is_reported_in_one_sentence(
    flag: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([flag])
    assert end.value.code == 2
    error_output = capsys.readouterr().err
    assert error_output.startswith("elastic-operator: ")
    assert complaint in error_output
    assert error_output.count("\n") == 1


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restore the logging configuration after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("own_logging")
def test_a_missing_kubeconfig_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kubeconfig=/nowhere"]) == 2
    assert capsys.readouterr().err == (
        "elastic-operator: there is no kubeconfig /nowhere; check the path after --kubeconfig\n"
    )


def a_record(message: str, level: int = logging.WARNING, *, error: bool = False) -> logging.LogRecord:
    problem = ValueError("odd")
    trace = (ValueError, problem, problem.__traceback__) if error else None
    record = logging.LogRecord("kopf.x", level, "file", 1, message, (), trace)
    record.created = 1_700_000_000.0
    return record


def test_a_line_has_time_level_and_message_and_then_the_traceback() -> None:
    line = TextLines().format(a_record("this copy leads", logging.INFO))
    assert line == "2023-11-14T22:13:20Z INFO    this copy leads"
    record = a_record("a defect", logging.ERROR, error=True)
    first, *_, last = TextLines().format(record).splitlines()
    assert (first, last) == ("2023-11-14T22:13:20Z ERROR   a defect", "ValueError: odd")
    line = json.loads(JsonLines().format(record))
    assert line.pop("traceback").endswith("ValueError: odd")
    assert line == {"time": "2023-11-14T22:13:20Z", "level": "error", "logger": "kopf.x", "message": "a defect"}
