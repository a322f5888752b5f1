"""The command ``elastic-operator``. Exit codes: 0 after SIGTERM, 1 after an unexpected error, 2 for bad input."""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_operator.api.json_values import rfc3339
from elastic_operator.errors import BadInput
from elastic_operator.kubernetes.settings import OperatorSettings
from elastic_operator.resources.owned_objects import AGENT_METRICS_PORT, ETCD_IMAGE, PodSettings
from torchelastic.connections import raise_descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BAD_INPUT: Final = 2
"""The exit code for invalid input."""

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

_EPILOG: Final = """\
In a pod it uses the pod's service account. Elsewhere, or with --kubeconfig or --context, it uses a kubeconfig.
SIGTERM stops the operator; the jobs continue to train without it.
"""

LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


class _Parser(argparse.ArgumentParser):
    """Prints an error as one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"elastic-operator: {message}; see `elastic-operator --help`\n")


def parse(argv: Sequence[str] | None, environ: Mapping[str, str]) -> OperatorSettings:
    """Return the settings of a command line; an invalid one ends the process with a message and exit code 2.

    Args:
        argv: the arguments without the program's name; None for this process's own.
        environ: the environment, in which POD_NAME and POD_NAMESPACE name this pod.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    in_pod = bool(environ.get("KUBERNETES_SERVICE_HOST"))
    if not in_pod and given.kubeconfig is None and given.context is None:
        # The cluster that the user used last must not be changed by accident.
        parser.error("this is not a pod: name a cluster with --context or --kubeconfig")
    return OperatorSettings(
        namespaces=tuple(dict.fromkeys(given.namespace)),
        etcd_secrets_namespaces=tuple(dict.fromkeys(given.etcd_secrets_namespace)),
        etcd_endpoints=tuple(dict.fromkeys(given.etcd_endpoints)),
        pods=PodSettings(
            etcd_image=given.etcd_image,
            agent_metrics_port=given.agent_metrics_port,
            network_policies=given.network_policies,
            metrics_namespaces=tuple(dict.fromkeys(given.metrics_namespace)),
            operator_namespace=environ.get("POD_NAMESPACE") or None,
        ),
        listen=given.listen,
        leader_elect=given.leader_elect,
        lease_namespace=given.lease_namespace or environ.get("POD_NAMESPACE") or None,
        lease_name=given.lease_name,
        kubeconfig=given.kubeconfig,
        context=given.context,
        log_format=given.log_format,
        log_level=given.log_level,
        identity=environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
        in_pod=in_pod and given.kubeconfig is None and given.context is None,
    )


def _parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="elastic-operator",
        description="Manage the pods of all ElasticJobs of a Kubernetes cluster.",
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
        help="manage only the jobs of this namespace; may be repeated (default: all namespaces)",
    )
    jobs.add_argument(
        "--etcd-image",
        default=ETCD_IMAGE,
        metavar="IMAGE",
        help="image of the etcd of a job that names none (default: %(default)s)",
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
        "--etcd-endpoints",
        action="append",
        default=[],
        type=_endpoints,
        metavar="CIDR|SUFFIX",
        help="use an etcd of spec.etcd.endpoint only at addresses in this range, or with names that end so; may be "
        "repeated (default: all but loopback, link-local and metadata addresses)",
    )
    jobs.add_argument(
        "--agent-metrics-port",
        default=AGENT_METRICS_PORT,
        type=_port,
        metavar="PORT",
        help="port of /metrics in the worker pods; 0 for any free port (default: %(default)s)",
    )
    jobs.add_argument(
        "--network-policies",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="create a NetworkPolicy for each job (default: yes)",
    )
    jobs.add_argument(
        "--metrics-namespace",
        action="append",
        default=[],
        type=_namespace,
        metavar="NS",
        help="let only the pods of this namespace read the metrics of jobs; may be repeated (default: everyone)",
    )
    process = top.add_argument_group("this process")
    process.add_argument(
        "--listen",
        default="0.0.0.0:8080",
        type=_address,
        metavar="HOST:PORT",
        help="address of /healthz, /readyz and /metrics; IPv6 in brackets (default: %(default)s)",
    )
    process.add_argument("--log-format", default="text", choices=LOG_FORMATS, help="(default: %(default)s)")
    process.add_argument("--log-level", default="info", choices=LOG_LEVELS, help="(default: %(default)s)")
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
        help="namespace of the lease (default: $POD_NAMESPACE, or the namespace of the kubeconfig's context)",
    )
    election.add_argument(
        "--lease-name", default="elastic-operator", type=_name, metavar="NAME", help="(default: %(default)s)"
    )
    connection = top.add_argument_group("the cluster")
    connection.add_argument("--kubeconfig", metavar="PATH", help="(default: $KUBECONFIG, or ~/.kube/config)")
    connection.add_argument("--context", metavar="CONTEXT", help="context of the kubeconfig (default: its current one)")
    return top


def _name(text: str) -> str:
    if len(text) > 253 or not all(map(_LABEL.fullmatch, text.split("."))):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name: lowercase letters, digits, dashes and dots")
    return text


def _namespace(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid namespace: at most 63 lowercase letters, digits and dashes"
        )
    return text


def _endpoints(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        if "/" in text or not re.search("[a-z]", text):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a range of addresses, such as 10.0.0.0/8: write its first address and its length"
            ) from None
        _name(text.removeprefix("."))
    return text


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid port: a number from 0 to 65535")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (":" in host and not bracketed) or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 0.0.0.0:8080 or [::]:8080")
    return (host[1:-1] if bracketed else host), int(port)


class TextLines(logging.Formatter):
    """Formats a line such as ``2026-01-31T12:00:00Z INFO    default/digits: …``; a traceback follows its line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime


class JsonLines(logging.Formatter):
    """Formats a line as a JSON object with the keys time, level, logger, message and, if there is one, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def set_up_log(log_format: str, level: str) -> None:
    """Send the log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level == "debug":
        for verbose in ("asyncio", "aiohttp.access"):
            logging.getLogger(verbose).setLevel(logging.INFO)
        return
    # The informer logs each problem once; kopf logs every attempt with a traceback.
    logging.getLogger("kopf").setLevel(logging.CRITICAL)


_GC_THRESHOLDS: Final = (20_000, 10, 10)
"""Thresholds of the garbage collector. With the default values, it takes a fifth of the CPU time, because the operator
keeps many objects of the cluster for a long time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator; return the exit code."""
    settings = parse(argv, os.environ)
    # Process 1 ignores signals without a handler, and the imports in _run() take a while.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    set_up_log(settings.log_format, settings.log_level)
    raise_descriptor_limit()
    try:
        asyncio.run(_run(settings))
    except BadInput as error:
        sys.stderr.write(f"elastic-operator: {error}\n")
        return BAD_INPUT
    return 0


async def _run(settings: OperatorSettings) -> None:
    from elastic_operator.kubernetes.client import Api
    from elastic_operator.kubernetes.manager import Manager

    gc.freeze()  # modules are never collected
    gc.set_threshold(*_GC_THRESHOLDS)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    connect = Api.in_cluster() if settings.in_pod else Api.from_kubeconfig(settings.kubeconfig, settings.context)
    async with await connect as api:
        await Manager(settings, api).run(stop)


if __name__ == "__main__":
    sys.exit(main())
