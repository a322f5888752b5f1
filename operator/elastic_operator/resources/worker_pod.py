"""A worker's pod: the job's template, completed with the agent, its environment, and defaults.

The template may override these defaults: memory on /dev/shm (a container gets 64 MiB otherwise); an empty folder on
/tmp, so that the root file system may be read-only; annotations for a Prometheus that no Prometheus operator manages;
no environment variables of services, which can prevent containers in large namespaces from starting; no token for the
API server; no privilege escalation or capabilities; a grace period in which workers can save a checkpoint; a short
toleration of unreachable nodes. There is no probe: the store shows at once whether an agent serves, and no Service
sends requests to these pods.

Agents on this machine get the same command line and the same environment.

An agent that is asked to leave gives its workers the time *notice* to save, and then the time *grace* between SIGTERM
and SIGKILL. The sum of both is below the pod's termination grace period. If the template does not set that period, the
period is the sum of notice, grace and :data:`AGENT_TIME`. If the template sets the period, a quarter of it (at most
:data:`AGENT_TIME`) is reserved for the agent itself; of the rest, grace gets its default but at most half, and notice
the remainder. The user's values for notice and grace take precedence.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import posixpath
import re
from typing import TYPE_CHECKING, Any, Final

from elastic_operator.api import constants
from elastic_operator.api.json_values import get_dict, get_dicts, get_int, get_list, get_str, rfc3339
from elastic_operator.api.spec import WORKER, FailureAction, launcher_flags, mounted_folders, program_of, user_env
from elastic_operator.api.validation import AGENT_TIME
from elastic_operator.resources import owned_objects as owned
from torchelastic.protocol.codec import encode
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from elastic_operator.api.json_values import Json
    from elastic_operator.api.spec import AppliedSpec, FailureRule
    from elastic_operator.controller.model import Job, NewPod


def completed(given: object, defaults: Json) -> object:
    """Return a mapping with defaults for missing and null values, recursively; return any other value unchanged."""
    return given if given is not None and not isinstance(given, dict) else completed_mapping(given or {}, defaults)


def completed_mapping(given: Json, defaults: Json) -> dict[str, Any]:
    """Return what :func:`completed` returns, for a value that is a mapping."""
    result = dict(given)
    for key, default in defaults.items():
        if isinstance(default, dict):
            result[key] = completed(result.get(key), default)
        elif result.get(key) is None:
            result[key] = copy.deepcopy(default)
    return result


def mount(
    pod: dict[str, Any], container: dict[str, Any], folder: str, name: str, source: Json, *, read_only: bool = False
) -> None:
    """Mount a volume in a container of a pod's spec, unless the template mounts a volume at that path.

    If another volume of the pod has the name, a number is added to it.
    """
    if posixpath.normpath(folder) in mounted_folders(container):
        return
    taken = {get_str(volume, "name") for volume in get_dicts(pod, "volumes")}
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    unused = next(each for each in names if each not in taken)
    pod["volumes"] = owned.extended(pod.get("volumes"), [{**source, "name": unused}])
    mounted = {"name": unused, "mountPath": folder, **({"readOnly": True} if read_only else {})}
    container["volumeMounts"] = owned.extended(container.get("volumeMounts"), [mounted])


def restricted(context: object) -> object:
    """Return a container's security context, completed with the defaults in :data:`owned_objects.RESTRICTED`."""
    defaults = dict(owned.RESTRICTED)
    asked = get_dict(context)
    # The API server rejects such containers together with ``allowPrivilegeEscalation: false``.
    if asked.get("privileged") is True or "CAP_SYS_ADMIN" in get_list(asked, "capabilities", "add"):
        del defaults["allowPrivilegeEscalation"]
    return completed(context, defaults)


_NAME: Final = "metadata.name"
"""The field that identifies a node; the node's label with its host name may differ from its name."""


def _exclude(pod: dict[str, Any], nodes: Collection[str]) -> None:
    """Exclude nodes, in addition to the pod's own node affinity."""
    # The API server accepts only one value in each requirement on a field.
    demands = [{"key": _NAME, "operator": "NotIn", "values": [node]} for node in sorted(nodes)]
    part: Any = pod
    for step in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        if part.get(step) is None:
            part[step] = {}
        part = part[step]
        if not isinstance(part, dict):
            return  # the API server reports it
    terms = part.get("nodeSelectorTerms")
    if terms is None:
        part["nodeSelectorTerms"] = [{"matchFields": demands}]
    for term in get_list(terms):
        # An empty term matches no node; with this requirement it would match all other nodes.
        if isinstance(term, dict) and (term.get("matchExpressions") or term.get("matchFields")):
            term["matchFields"] = owned.extended(term.get("matchFields"), demands)


_TERMINATION_LOG: Final = "/dev/termination-log"
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"


def worker_pod(job: Job, new: NewPod, settings: owned.PodSettings, *, store: str) -> dict[str, Any]:
    """Return the pod, ready to be created; it shares no data with the job.

    Args:
        job: the job of the pod.
        new: the pod of the plan.
        settings: the defaults for pods.
        store: host:port of the store, several separated by commas.
    """
    template = copy.deepcopy(dict(job.spec.template))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(job, new, template.get("metadata"), metrics_port(job, settings)),
        "spec": _spec(job, new, settings, store, template.get("spec")),
    }


def on_the_host(job: Job) -> bool:
    """Return whether the pods are on the network of their nodes."""
    return get_dict(job.spec.template, "spec").get("hostNetwork") is True


def metrics_port(job: Job, settings: owned.PodSettings) -> int:
    """Return the port of the agent's /metrics; 0 for any free port."""
    if job.spec.metrics_port is not None:
        return job.spec.metrics_port
    # Pods on the host's network share its ports.
    return 0 if on_the_host(job) else settings.agent_metrics_port


def _metadata(job: Job, new: NewPod, given: object, metrics_port: int) -> object:
    defaults = {_DEFAULT_CONTAINER: WORKER}
    if metrics_port:
        defaults |= owned.for_prometheus(metrics_port)
    metadata = completed(given, {"labels": owned.common_labels(job, constants.ROLE_WORKER), "annotations": defaults})
    if not isinstance(metadata, dict):
        return metadata
    own = {
        **owned.own_labels(job, constants.ROLE_WORKER),
        constants.LABEL_INDEX: str(new.index),
        **owned.gang_marks(job, "labels"),
    }
    notes = {
        **owned.gang_marks(job, "annotations"),
        constants.ANNOTATION_PROTOCOL: str(PROTOCOL_VERSION),
        constants.ANNOTATION_FAILURES: str(new.failures),
        **({} if new.failed is None else {constants.ANNOTATION_FAILED: rfc3339(new.failed)}),
        constants.ANNOTATION_SIZE: encode(new.size).decode(),
        **({constants.ANNOTATION_METRICS_PORT: str(metrics_port)} if metrics_port else {}),
    }
    for key, added in (("labels", own), ("annotations", notes)):
        if isinstance(metadata[key], dict):
            metadata[key] |= added
    return {
        **metadata,
        "name": new.name,
        "namespace": job.namespace,
        "ownerReferences": owned.extended(metadata.get("ownerReferences"), [owned.owner_reference(job)]),
    }


def _spec(job: Job, new: NewPod, settings: owned.PodSettings, store: str, given: object) -> object:
    defaults = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": owned.SECCOMP,
        "terminationGracePeriodSeconds": termination_settings(job.spec)[0],
    }
    pod = completed(given, defaults)
    if not isinstance(pod, dict):
        return pod
    pod |= {"restartPolicy": "Never", "hostname": constants.hostname(job.name, new.index)}
    owned.tolerate_unreachable_node(pod, job.spec.node_loss)
    scheduling = {
        "schedulerName": owned.scheduler_of(job.spec.scheduling),
        "priorityClassName": job.spec.scheduling.priority_class,
    }
    pod |= {field: value for field, value in scheduling.items() if value and pod.get(field) is None}
    if new.excluded:
        _exclude(pod, new.excluded)
    containers = pod.get("containers")
    if containers is None or isinstance(containers, list):
        pod["containers"] = _containers(containers or [], _worker_in(pod, job, new, settings, store))
    return pod


def _containers(given: list[Any], worker: dict[str, Any]) -> list[Any]:
    """Return the template's containers; the worker replaces the one with its name, or becomes the first."""
    for position, container in enumerate(given):
        if get_dict(container).get("name") == WORKER:
            return [*given[:position], worker, *given[position + 1 :]]
    return [worker, *given]


def _worker_in(pod: dict[str, Any], job: Job, new: NewPod, settings: owned.PodSettings, store: str) -> dict[str, Any]:
    """Return the worker container, and add the volumes that it needs to the pod."""
    given: Json = next((entry for entry in get_dicts(pod, "containers") if entry.get("name") == WORKER), {})
    container = completed_mapping(
        given, {"terminationMessagePath": _TERMINATION_LOG, "terminationMessagePolicy": "FallbackToLogsOnError"}
    )
    port, secret = metrics_port(job, settings), owned.tls_secret(job)
    variables = agent_variables(
        job,
        new,
        store=store,
        checkpoints=f"{constants.CHECKPOINT_FOLDER}/{job.name}/{new.index}",
        termination_log=str(container["terminationMessagePath"]),
        metrics_port=port,
        tls=None if secret is None else constants.ETCD_TLS_FOLDER,
    )
    container |= {
        "name": WORKER,
        "image": job.spec.image or given.get("image"),
        "command": [LAUNCHER],
        "args": list(agent_arguments(job.spec)),
        # The user's variables come last, so that they may refer to the operator's.
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {"name": Env.NODE_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *copy.deepcopy([dict(entry) for entry in user_env(job.spec)]),
        ],
        "securityContext": restricted(given.get("securityContext")),
    }
    if port:
        declared = {"name": constants.METRICS_PORT, "containerPort": port, "protocol": "TCP"}
        container["ports"] = owned.extended(given.get("ports"), [declared])
    if secret is not None:  # for the agent, and for workers that want it
        mount(pod, container, constants.ETCD_TLS_FOLDER, "etcd-tls", {"secret": {"secretName": secret}}, read_only=True)
    mount(pod, container, "/dev/shm", "dshm", {"emptyDir": {"medium": "Memory"}})  # noqa: S108 - in a container
    mount(pod, container, "/tmp", "tmp", {"emptyDir": {}})  # noqa: S108
    checkpoints: Json = job.spec.checkpoint.volume or {"emptyDir": {}}
    mount(pod, container, constants.CHECKPOINT_FOLDER, "checkpoints", copy.deepcopy(checkpoints))
    return container


LAUNCHER: Final = "torchelastic-run"
"""The agent's executable in an image."""

NOTICE: Final = 30.0
"""The default notice in seconds."""

GRACE: Final = 30.0
"""The default grace in seconds."""

_LONGEST_NOTICE: Final = 24 * 3600.0
"""Maximum notice that an agent accepts, in seconds."""

_LONGEST: Final = 7 * 24 * 3600.0

_REFERENCE: Final = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")


def agent_arguments(spec: AppliedSpec) -> tuple[str, ...]:
    """Return the arguments of the agent: flags, the program, and the program's arguments."""
    command, args = program_of(spec)
    return ("--no-python", "--", *command, *args) if command else args


def agent_variables(
    job: Job, pod: NewPod, *, store: str, checkpoints: str, termination_log: str, metrics_port: int, tls: str | None
) -> dict[str, str]:
    """Return the operator's variables for a pod's agent, except for the address of its node.

    Args:
        job: the job of the pod.
        pod: the pod of the plan.
        store: host:port of the store, several separated by commas.
        checkpoints: the folder for the program's checkpoints.
        termination_log: the file for the agent's termination message.
        metrics_port: the port of the agent's /metrics; 0 for any free port.
        tls: the folder with the certificates for the store; None for none.
    """
    spec, rendezvous = job.spec, job.spec.rendezvous
    conf = {
        "last_call_timeout": rendezvous.joining_window,
        "join_timeout": rendezvous.join_timeout,
        "lease": rendezvous.lease,
    }
    optional = {
        "PET_NON_RETRYABLE_EXIT_CODES": _exit_codes(spec.failure_policy.rules, FailureAction.FAIL_JOB),
        "PET_UNCHARGED_EXIT_CODES": _exit_codes(spec.failure_policy.rules, FailureAction.IGNORE),
        "PET_PORT_RANGE": "" if rendezvous.ports is None else f"{rendezvous.ports.first}-{rendezvous.ports.last}",
        "PET_RDZV_CONF": ",".join(f"{key}={value}" for key, value in conf.items() if value is not None),
        "PET_WARM_SPARE": "1" if spec.spares and not _sets(spec, "PET_WARM_SPARE") else "",
        Env.ETCD_TLS: tls,
        Env.RESUME: "" if pod.resume is None else encode(pod.resume).decode(),
    }
    return {
        "PET_RDZV_ENDPOINT": store,
        "PET_RDZV_ID": job.uid,
        "PET_NNODES": f"{spec.min_replicas}:{spec.max_replicas}",
        "PET_NPROC_PER_NODE": str(spec.nproc_per_node),
        "PET_MAX_RESTARTS": str(spec.max_restarts),
        "PET_PREFIX": "1",
        Env.NODE_NAME: pod.name,
        Env.SIZE: encode(pod.size).decode(),
        Env.JOB: f"{job.namespace}/{job.name}",
        Env.JOB_CREATED: f"{job.created:.3f}",
        Env.UNIQUE_RUN: "1",
        Env.CHECKPOINT_DIR: checkpoints,
        Env.TERMINATION_LOG: termination_log,
        Env.PROTOCOL: str(PROTOCOL_VERSION),
        Env.METRICS_PORT: str(metrics_port),
        **{variable: value for variable, value in optional.items() if value},
        **termination_settings(spec)[1],
    }


def _sets(spec: AppliedSpec, variable: str) -> bool:
    return any(entry.get("name") == variable for entry in user_env(spec))


@functools.lru_cache(maxsize=256)
def _exit_codes(rules: tuple[FailureRule, ...], action: FailureAction) -> str:
    """Return the workers' exit codes to which the failure policy assigns this action, such as ``3,64-66,137``."""
    of_workers = [(rule.exit_codes, rule.action) for rule in rules if rule.exit_codes is not None]
    codes = [code for code in range(1, 256) if next((act for of, act in of_workers if code in of), None) is action]
    firsts = [code for code in codes if code - 1 not in codes]
    lasts = [code for code in codes if code + 1 not in codes]
    return ",".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    )


def termination_settings(spec: AppliedSpec) -> tuple[int, dict[str, str]]:
    """Return the termination grace period of a job's pods in seconds, and the variables for their agents."""
    variables: dict[str, str] = {}
    notice, grace = _given_time(spec, "notice"), _given_time(spec, "shutdown-timeout", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if grace is None and spec.grace_period is not None:
        grace, variables["PET_SHUTDOWN_TIMEOUT"] = float(spec.grace_period), f"{spec.grace_period}"
    period = get_int(spec.template, "spec", "terminationGracePeriodSeconds")
    if period is None or period < 0:
        # The period covers at least the agent's defaults, because a flag that was found may belong to the program.
        return math.ceil(max(notice or 0.0, NOTICE) + max(grace or 0.0, GRACE) + AGENT_TIME), variables
    left = period - min(AGENT_TIME, period / 4)
    if grace is None:
        grace = min(GRACE, left / 2 if notice is None else max(left - notice, 0.0))
        variables["PET_SHUTDOWN_TIMEOUT"] = f"{grace:g}"
    if notice is None:
        variables["PET_NOTICE"] = f"{min(max(left - grace, 0.0), _LONGEST_NOTICE):g}"
    return period, variables


def _given_time(spec: AppliedSpec, flag: str, *variables: str) -> float | None:
    """Return the seconds from a flag in the arguments, or else from its variables; None without a valid value.

    The flag's own variable takes precedence over the others.
    """
    command, args = program_of(spec)
    names = [*variables, f"PET_{flag.upper().replace('-', '_')}"]
    given = [entry.get("value") for name in names for entry in user_env(spec) if entry.get("name") == name]
    given += [each.value for each in (() if command else launcher_flags(args)) if each.name == flag]
    try:
        seconds = float(str(given[-1])) if given else -1.0
    except ValueError:
        return None
    return min(seconds, _LONGEST) if 0 <= seconds < math.inf else None


def expand_references(
    arguments: Iterable[str], variables: Mapping[str, str], entries: Iterable[Json]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the arguments and all literal variables with their references expanded, as by a kubelet.

    ``$(NAME)`` is the value of a variable that was defined before, ``$$`` a dollar sign. Unknown references are kept.
    Entries with ``valueFrom`` are omitted, because only a cluster knows their values.

    Args:
        arguments: the arguments of the agent.
        variables: the operator's variables.
        entries: the user's variables.
    """
    env = dict(variables)
    for entry in entries:
        if "valueFrom" not in entry:
            env[str(entry.get("name"))] = _expand(str(entry.get("value") or ""), env)
    return tuple(_expand(argument, env) for argument in arguments), env


def _expand(text: str, env: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)
