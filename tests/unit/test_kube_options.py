"""The command line of the operator."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from elastic_operator.kubernetes.main import Address, LogFormat, LogLevel, OperatorSettings, main, parse
from elastic_operator.resources.metadata import PodSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "POD_NAME": "operator-0", "POD_NAMESPACE": "elastic-system"}


def test_without_flags_it_looks_after_all_namespaces_and_elects_a_leader() -> None:
    settings = parse([], IN_A_POD)
    assert settings == OperatorSettings(identity="operator-0", lease_namespace="elastic-system", in_pod=True)
    assert settings.namespaces == ()
    assert settings.leader_elect
    assert settings.listen == Address("0.0.0.0", 8080)


def test_every_flag_is_heard() -> None:
    settings = parse(
        [
            "--namespace=a", "--namespace=b", "--namespace=a", "--etcd-image=my/etcd:1", "--agent-metrics-port=0",
            "--listen=[::1]:9", "--no-leader-elect", "--lease-namespace=c", "--lease-name=d", "--kubeconfig=/e",
            "--context=f", "--log-format=json", "--log-level=warning", "--etcd-secrets-namespace=g",
            "--etcd-secrets-namespace=h", "--etcd-secrets-namespace=g",
        ],
        IN_A_POD,
    )  # fmt: skip
    assert settings == OperatorSettings(
        namespaces=("a", "b"),
        etcd_secrets_namespaces=("g", "h"),
        pods=PodSettings(etcd_image="my/etcd:1", agent_metrics_port=0),
        listen=Address("::1", 9),
        leader_elect=False,
        lease_namespace="c",
        lease_name="d",
        kubeconfig="/e",
        context="f",
        log_format=LogFormat.JSON,
        log_level=LogLevel.WARNING,
        identity="operator-0",
        in_pod=False,
    )


def test_outside_of_a_pod_two_processes_have_different_names() -> None:
    one, other = parse(["--context=test"], {}), parse(["--context=test"], {})
    assert one.identity != other.identity
    assert not one.in_pod
    assert one.lease_namespace is None


def test_outside_of_a_pod_no_cluster_is_touched_that_was_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([], {"KUBECONFIG": "/production"})
    assert "name a cluster with --context or --kubeconfig" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--namespace=Team", "'Team' is no namespace: small letters, digits and dashes, at most 63 of them"),
        ("--etcd-image=a b", "'a b' is no image, such as quay.io/coreos/etcd:v3.7.3"),
        ("--agent-metrics-port=70000", "'70000' is no port: a number from 0 to 65535"),
        ("--listen=8080", "'8080' is not HOST:PORT, such as 0.0.0.0:8080 or [::]:8080"),
        ("--listen=::1:8080", "'::1:8080' is not HOST:PORT, such as 0.0.0.0:8080 or [::]:8080"),
        ("--lease-name=a_b", "'a_b' is no name of an object: small letters, digits, dashes and dots"),
        ("--log-level=loud", "invalid choice: 'loud'"),
        ("--name", "unrecognized arguments: --name"),
    ],
)
def test_a_bad_flag_is_told_in_a_sentence(flag: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([flag])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("elastic-operator: ")
    assert complaint in told
    assert told.count("\n") == 1


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Whatever is set up for the log is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("own_logging")
def test_a_kubeconfig_that_is_not_there_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kubeconfig=/nowhere"]) == 2
    assert capsys.readouterr().err == (
        "elastic-operator: there is no kubeconfig /nowhere; check the path after --kubeconfig\n"
    )
