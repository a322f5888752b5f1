"""The command line of ``elastic-operator``: its flags, and the settings that come of them."""

from __future__ import annotations

import argparse
import enum
import os
import re
import secrets
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_operator.resources.pod_settings import AGENT_METRICS_PORT, ETCD_IMAGE, PodSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BAD_INPUT: Final = 2
"""The exit code for a command line that can't be honoured."""

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

_DESCRIPTION: Final = "Keep the pods of all ElasticJobs of a Kubernetes cluster as their specs want them."
_EPILOG: Final = """\
In a pod it reaches the API server with the pod's service account; elsewhere, or where --kubeconfig or --context is
given, with a kubeconfig. SIGTERM ends it: the jobs train on without it.
"""


class LogFormat(enum.StrEnum):
    """How a line of the log looks."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """What is logged: this, and all that is worse."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen.

    Attributes:
        host: an address or a host's name; empty for all of them.
        port: 0 for any free one.
    """

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """How the operator is run.

    Attributes:
        namespaces: whose jobs it looks after; empty for all.
        etcd_secrets_namespaces: where it may read the Secrets with credentials for etcd.
        pods: what pods are made with where the job does not say.
        listen: where /healthz, /readyz and /metrics are served.
        leader_elect: whether it acts only while it holds the lease, so that several copies may run.
        lease_namespace: of the lease; None for the operator's own namespace.
        lease_name: of the lease.
        kubeconfig: a file; None for the pod's service account, or where a context is given for the usual file.
        context: of the kubeconfig; None for its current one.
        log_format: how a line of the log looks.
        log_level: what is logged.
        identity: what this copy is called in the lease and in events; no two processes at once have the same.
        in_pod: whether it runs in a pod with a service account.
    """

    namespaces: tuple[str, ...] = ()
    etcd_secrets_namespaces: tuple[str, ...] = ()
    pods: PodSettings = field(default_factory=PodSettings)
    listen: Address = Address("0.0.0.0", 8080)  # noqa: S104 - probes and Prometheus come from other hosts
    leader_elect: bool = True
    lease_namespace: str | None = None
    lease_name: str = "elastic-operator"
    kubeconfig: str | None = None
    context: str | None = None
    log_format: LogFormat = LogFormat.TEXT
    log_level: LogLevel = LogLevel.INFO
    identity: str = "elastic-operator"
    in_pod: bool = False


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"elastic-operator: {message}; see `elastic-operator --help`\n")


def parse(argv: Sequence[str] | None, environ: Mapping[str, str]) -> OperatorSettings:
    """The settings that a command line asks for; a bad one ends the process with a sentence and exit code 2.

    Args:
        argv: without the program's name; None for this process's own.
        environ: POD_NAME and POD_NAMESPACE say which pod this is.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    in_pod = bool(environ.get("KUBERNETES_SERVICE_HOST"))
    if not in_pod and given.kubeconfig is None and given.context is None:
        # Whatever cluster somebody used last is not to be changed by a word less.
        parser.error("this is no pod: name a cluster with --context or --kubeconfig")
    return OperatorSettings(
        namespaces=tuple(dict.fromkeys(given.namespace)),
        etcd_secrets_namespaces=tuple(dict.fromkeys(given.etcd_secrets_namespace)),
        pods=PodSettings(etcd_image=given.etcd_image, agent_metrics_port=given.agent_metrics_port),
        listen=given.listen,
        leader_elect=given.leader_elect,
        lease_namespace=given.lease_namespace or environ.get("POD_NAMESPACE") or None,
        lease_name=given.lease_name,
        kubeconfig=given.kubeconfig,
        context=given.context,
        log_format=LogFormat(given.log_format),
        log_level=LogLevel(given.log_level),
        identity=environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
        in_pod=in_pod and given.kubeconfig is None and given.context is None,
    )


def _parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="elastic-operator",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    jobs = top.add_argument_group("jobs")
    jobs.add_argument(
        "--namespace",
        action="append",
        default=[],
        type=_namespace,
        metavar="NS",
        help="look after the jobs of this namespace only; may be repeated (default: all namespaces)",
    )
    jobs.add_argument(
        "--etcd-image",
        default=ETCD_IMAGE,
        type=_image,
        metavar="IMAGE",
        help="of the etcd that is made for jobs which name none (default: %(default)s)",
    )
    jobs.add_argument(
        "--etcd-secrets-namespace",
        action="append",
        default=[],
        type=_namespace,
        metavar="NS",
        help="read the Secrets that jobs of this namespace name in spec.etcd.tlsSecret; may be repeated",
    )
    jobs.add_argument(
        "--agent-metrics-port",
        default=AGENT_METRICS_PORT,
        type=_port,
        metavar="PORT",
        help="of /metrics in the worker pods; 0 for any free one (default: %(default)s)",
    )
    process = top.add_argument_group("this process")
    process.add_argument(
        "--listen",
        default="0.0.0.0:8080",
        type=_address,
        metavar="HOST:PORT",
        help="where /healthz, /readyz and /metrics are served; IPv6 in brackets (default: %(default)s)",
    )
    process.add_argument("--log-format", default="text", choices=tuple(LogFormat), help="(default: %(default)s)")
    process.add_argument("--log-level", default="info", choices=tuple(LogLevel), help="(default: %(default)s)")
    election = top.add_argument_group("several copies")
    election.add_argument(
        "--leader-elect",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="act only while this copy holds the lease (default: yes)",
    )
    election.add_argument(
        "--lease-namespace",
        type=_namespace,
        metavar="NS",
        help="where the lease is (default: $POD_NAMESPACE, or the namespace of the kubeconfig's context)",
    )
    election.add_argument(
        "--lease-name", default="elastic-operator", type=_name, metavar="NAME", help="(default: %(default)s)"
    )
    connection = top.add_argument_group("the cluster")
    connection.add_argument("--kubeconfig", metavar="PATH", help="(default: $KUBECONFIG, or ~/.kube/config)")
    connection.add_argument("--context", metavar="CONTEXT", help="of the kubeconfig (default: its current one)")
    return top


def _namespace(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no namespace: small letters, digits and dashes, at most 63 of them"
        )
    return text


def _name(text: str) -> str:
    if len(text) > 253 or not _SUBDOMAIN.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of an object: small letters, digits, dashes and dots")
    return text


def _image(text: str) -> str:
    if not text or text != text.strip() or " " in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no image, such as {ETCD_IMAGE}")
    return text


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 to 65535")
    return int(text)


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (":" in host and not bracketed) or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 0.0.0.0:8080 or [::]:8080")
    return Address(host[1:-1] if bracketed else host, int(port))
