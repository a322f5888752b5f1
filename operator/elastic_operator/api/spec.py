"""The spec of an ElasticJob: typed, with every default filled in.

The CRD (crds/elasticjob.yaml) defines which manifests are valid. The structs of this module decode a valid manifest.
:class:`AppliedSpec` is the part from which a job's pods are created; ``status.appliedSpec`` keeps a copy of it.

torchrun and ``torchelastic-run`` parse a command line by the same rules. The agent checks the flags. The operator only
determines which flags are set, and rejects those that are reserved for it.

The first controller for this group and version was archived in 2022. Its manifests have ``rdzvEndpoint`` and
``replicaSpecs.Worker``. The CRD accepts the old and the current form, but not a mixture. :func:`current_spec` converts
the old form to the current one:

* A pod ran the image's launcher with the controller's flags and the container's ``args``, which begin with more flags
  of the launcher (``--nproc_per_node=1``). The operator now sets the launcher and the controller's flags, so a launcher
  in ``command`` and these flags are removed. Any other command starts a launcher in its own way and is rejected.
* A flag that corresponds to a field of the current spec becomes that field.
* The container may have any name.
* Names and restart policies inside the template, and its ``kind``, had no effect and are ignored.
* ``replicas`` was the number of pods, and the default of each bound. (The default of the lower bound is now 1.)
* With ``restartPolicy: Never``, the job failed when a pod failed; otherwise the failed pod was replaced.
"""

from __future__ import annotations

import enum
import itertools
import posixpath
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import msgspec

from elastic_operator.api.json_values import Json, get_dict, get_dicts, get_int, get_list, get_str, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

GROUP: Final = "elastic.pytorch.org"
VERSION: Final = "v1alpha1"
KIND: Final = "ElasticJob"

WORKER: Final = "worker"
"""The name of the job's own container in the template."""

MANAGER: Final = f"{GROUP}/elastic-operator"
"""The value of ``spec.managedBy`` for jobs of this operator, and the default of this field."""

NEVER: Final = "Never"
"""The restart policy of every pod: only the operator replaces pods."""


class CleanPodPolicy(enum.StrEnum):
    """Which pods of a finished job are deleted."""

    ALL = "All"
    RUNNING = "Running"
    """The pods in which a container still runs; the others are kept for their logs."""
    NONE = "None"


class FailureAction(enum.StrEnum):
    """What the operator or the agents do after a failure."""

    FAIL_JOB = "FailJob"
    IGNORE = "Ignore"
    """The worker or pod is replaced, and the failure does not count."""
    COUNT = "Count"
    """The worker or pod is replaced, and the failure counts; this also applies if no rule matches."""


class GangScheduler(enum.StrEnum):
    """The scheduler whose PodGroup starts all pods of a job together or none of them."""

    SCHEDULER_PLUGINS = "SchedulerPlugins"
    VOLCANO = "Volcano"


class _Part(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A part of the spec."""


class ExitCodes(_Part, frozen=True):
    """A set of exit codes from 1 to 255: those in ``values`` or, with ``NotIn``, all others. 128 + n means signal n."""

    values: frozenset[int]
    operator: Literal["In", "NotIn"]

    def __contains__(self, code: object) -> bool:
        return (code in self.values) is (self.operator == "In")


class PodCondition(_Part, frozen=True):
    """A condition of a pod, such as DisruptionTarget."""

    type: str
    status: str = "True"


class FailureRule(_Part, frozen=True):
    """The action for failures of one kind. Exactly one of exit codes, pod reasons and pod conditions is set.

    Attributes:
        exit_codes: the exit codes of worker programs. The agents apply such a rule.
        pod_reasons: the reasons for which pods end, such as OOMKilled or Evicted. The operator applies such a rule.
        pod_conditions: the conditions of pods that end. The operator applies such a rule.
        exclude_node: whether later pods avoid the failed pod's node.
    """

    action: FailureAction
    exit_codes: ExitCodes | None = msgspec.field(default=None, name="onExitCodes")
    pod_reasons: frozenset[str] = msgspec.field(default=frozenset(), name="onPodReasons")
    pod_conditions: tuple[PodCondition, ...] = msgspec.field(default=(), name="onPodConditions")
    exclude_node: bool = False


class FailurePolicy(_Part, frozen=True):
    """Rules for failures; the first one that matches applies."""

    rules: tuple[FailureRule, ...] = ()


class SchedulingSpec(_Part, frozen=True):
    """How the pods are scheduled.

    Attributes:
        gang: the scheduler whose PodGroup is created; None for no PodGroup.
        scheduler_name: the scheduler of the pods; None for the gang's scheduler, or else the cluster's default.
        queue: the queue of Volcano's PodGroup; empty for Volcano's default.
        priority_class: the priority class of the pods and the PodGroup; empty for the cluster's default.
    """

    gang: GangScheduler | None = None
    scheduler_name: str | None = None
    queue: str = ""
    priority_class: str = msgspec.field(default="", name="priorityClassName")


class PortRange(_Part, frozen=True):
    """The first and the last of a range of ports."""

    first: int
    last: int


class RendezvousSpec(_Part, frozen=True):
    """The rendezvous of the agents; None stands for the agent's default.

    Attributes:
        joining_window: seconds that the first round waits for more pods than the minimum.
        join_timeout: seconds after which the job fails if fewer pods than the minimum have joined.
        lease: seconds after which a pod without heartbeats counts as lost.
        ports: the ports on which agents listen to each other; None for any free ports.
    """

    joining_window: int | None = msgspec.field(default=None, name="joiningWindowSeconds")
    join_timeout: int | None = msgspec.field(default=None, name="joinTimeoutSeconds")
    lease: int | None = msgspec.field(default=None, name="leaseSeconds")
    ports: PortRange | None = None


class EtcdSecurity(enum.StrEnum):
    """Who can connect to the etcd that is created for a job."""

    TLS = "TLS"
    """Only its pods and the operator, which have certificates."""
    NONE = "None"
    """Everyone who reaches it."""


class EtcdSpec(_Part, frozen=True):
    """The store of the job.

    Attributes:
        endpoint: host:port of an existing etcd, several separated by commas; None to create an etcd for the job.
        tls_secret: the Secret with ``ca.crt``, and ``tls.crt`` and ``tls.key`` for client authentication; for
            ``endpoint`` only. None to trust the system's authorities.
        security: who can connect to the created etcd.
        resources: the resources of the created etcd, as in a container's spec.
        storage: the storage of the created etcd, as in a volume claim; None to keep the data only as long as the pod.
    """

    endpoint: str | None = None
    tls_secret: str | None = None
    image: str | None = None
    security: EtcdSecurity = EtcdSecurity.TLS
    resources: dict[str, Any] = {}
    storage: dict[str, Any] | None = None

    @property
    def has_certificates(self) -> bool:
        """Whether the operator issues certificates for the created etcd and its clients."""
        return self.endpoint is None and self.security is EtcdSecurity.TLS

    @property
    def is_open(self) -> bool:
        """Whether everyone who reaches the created etcd can use it."""
        return self.endpoint is None and self.security is EtcdSecurity.NONE


class CheckpointSpec(_Part, frozen=True):
    """The volume for the program's checkpoints: any volume source; None for an emptyDir, which ends with its pod."""

    volume: dict[str, Any] | None = None


class AppliedSpec(_Part, frozen=True, kw_only=True):
    """The part of the spec from which pods are created. A change takes effect when the job is suspended and resumed.

    Attributes:
        image: the image of the worker container; None if the template names it.
        command: the program of each worker; empty to pass ``args`` to torchelastic-run.
        args: the arguments of ``command``, or of torchelastic-run.
        env: additional environment variables, each as in a container's spec.
        nproc_per_node: workers in each pod: a number, or "auto", "cpu", "gpu".
        grace_period: seconds between SIGTERM and SIGKILL for workers; None for the default.
        node_loss: seconds after which pods on a node without heartbeats count as lost.
        metrics_port: the port of the agents' /metrics; None for the operator's default.
        template: a pod template, as the user wrote it.
    """

    image: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[dict[str, Any], ...] = ()
    nproc_per_node: int | str = 1
    failure_policy: FailurePolicy = FailurePolicy()
    scheduling: SchedulingSpec = msgspec.field(default=SchedulingSpec(), name="schedulingPolicy")
    rendezvous: RendezvousSpec = RendezvousSpec()
    etcd: EtcdSpec = EtcdSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    grace_period: int | None = msgspec.field(default=None, name="gracePeriodSeconds")
    node_loss: int = msgspec.field(default=15, name="nodeLossSeconds")
    metrics_port: int | None = None
    template: dict[str, Any] = {}


class ElasticJobSpec(AppliedSpec, frozen=True, kw_only=True):
    """The spec of a job.

    Attributes:
        min_replicas: the minimum number of pods for training.
        replicas: the desired number of pods; None until the user or the operator has set it.
        first_replicas: the initial number of pods in a manifest of the first controller; None for the maximum.
        spares: the number of pods beyond the desired number, which stand by to take the place of a lost pod.
        max_restarts: the maximum number of worker failures that count in the whole job.
        backoff_limit: the maximum number of pod failures that count.
        suspend: whether the job is suspended, so that it has no pods.
        active_deadline: the maximum number of seconds that the job runs after its start or last resumption.
        ttl_after_finished: seconds from the end of the job to its deletion; None to keep it.
        clean_pod_policy: which pods of the finished job are deleted.
        disruption_budget: whether a PodDisruptionBudget forbids evictions that leave fewer pods than the minimum.
        unsupported_reason: why a manifest of the first controller is not supported, in a sentence; None if supported.
    """

    min_replicas: int
    max_replicas: int
    replicas: int | None = None
    first_replicas: int | None = None
    spares: int = 0
    max_restarts: int = 100
    backoff_limit: int = 100
    suspend: bool = False
    active_deadline: int | None = msgspec.field(default=None, name="activeDeadlineSeconds")
    ttl_after_finished: int | None = msgspec.field(default=None, name="ttlSecondsAfterFinished")
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    disruption_budget: bool = False
    unsupported_reason: str | None = None

    @classmethod
    def of(cls, spec: Json) -> Self:
        """Decode a valid ``spec`` in the current form or in the form of the first controller.

        Raises:
            msgspec.ValidationError: a value has another type than the CRD allows.
        """
        current = {key: value for key, value in current_spec(spec).items() if value is not None}
        if "maxRestarts" in current:
            current = {"backoffLimit": current["maxRestarts"], **current}
        for key in ("command", "args", "env", "etcd", "checkpoint", "rendezvous", "schedulingPolicy", "failurePolicy"):
            if isinstance(value := current.get(key), dict):
                current[key] = {name: inner for name, inner in value.items() if inner is not None}
        replicas = spec.get("replicas")
        return msgspec.structs.replace(
            msgspec.convert(current, cls),
            replicas=replicas,
            first_replicas=current.get("replicas") if replicas is None else None,
        )

    @property
    def desired(self) -> int:
        """The desired number of pods, within the bounds and without spares."""
        wanted = self.first_replicas if self.replicas is None else self.replicas
        return min(max(self.max_replicas if wanted is None else wanted, self.min_replicas), self.max_replicas)

    @property
    def applied(self) -> AppliedSpec:
        """The part of the spec from which pods are created."""
        return AppliedSpec(**{name: getattr(self, name) for name in AppliedSpec.__struct_fields__})

    def with_applied(self, applied: AppliedSpec | None) -> Self:
        """Return the spec with the values of the applied spec in place of its own; unchanged if ``applied`` is None."""
        if applied is None:
            return self
        values = {name: getattr(applied, name) for name in AppliedSpec.__struct_fields__}
        # An unsupported spec is never applied.
        return msgspec.structs.replace(self, unsupported_reason=None, **values)


# The CRD leaves the template opaque, so any value in it may have an unexpected type.


def worker_container(spec: AppliedSpec) -> Json:
    """Return the template's container ``worker``; an empty one if the template has none."""
    containers = get_dicts(spec.template, "spec", "containers")
    return next((container for container in containers if container.get("name") == WORKER), {})


def mounted_folders(container: Json) -> frozenset[str]:
    """Return the folders of a container on which volumes are mounted."""
    paths = (mount.get("mountPath") for mount in get_dicts(container, "volumeMounts"))
    return frozenset(posixpath.normpath(path) for path in paths if isinstance(path, str) and path)


def program_of(spec: AppliedSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the command and the arguments, from the spec or from the template's container ``worker``."""
    container = worker_container(spec)
    return (
        spec.command or tuple(str(item) for item in get_list(container, "command")),
        spec.args or tuple(str(item) for item in get_list(container, "args")),
    )


def user_env(spec: AppliedSpec) -> tuple[Json, ...]:
    """Return the user's environment variables, each as in a container's spec: the template's, then the spec's."""
    return (*get_dicts(worker_container(spec), "env"), *spec.env)


def changed_fields(spec: ElasticJobSpec, applied: AppliedSpec) -> tuple[str, ...]:
    """Return the fields that differ from the applied spec, such as ``spec.args``."""
    keys = zip(AppliedSpec.__struct_fields__, AppliedSpec.__struct_encode_fields__, strict=True)
    return tuple(f"spec.{key}" for name, key in keys if getattr(applied, name) != getattr(spec, name))


_FORMER_WORKER: Final = "elasticjob-worker"
"""The name of the job's own container in the first controller's examples."""

_ARCHIVED: Final = ("rdzvEndpoint", "replicaSpecs", "RunPolicy")
_POLICIES: Final = ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
_WITHOUT_EFFECT: Final = ("name", "generateName", "namespace")

_OPERATORS: Final = frozenset(
    {
        "master-addr",
        "master-port",
        "nnodes",
        "node-rank",
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "standalone",
        "use-env",
    }
)
"""Flags of the launcher that the operator sets, or that are obsolete."""

_FIELDS: Final = {"nproc-per-node": "nprocPerNode", "max-restarts": "maxRestarts"}
"""By flag of the launcher, the field of the spec that replaces the flag."""


def current_spec(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a valid spec to the current form; return it unchanged if it already has that form.

    If the spec is not supported, the field ``unsupportedReason`` of the result contains the reason, in a sentence.
    """
    if "replicaSpecs" not in spec:
        return spec
    worker = get_dict(spec, "replicaSpecs", "Worker")
    current = {key: value for key, value in spec.items() if key not in _ARCHIVED}
    current |= {key: value for key, value in get_dict(spec, "RunPolicy").items() if key in _POLICIES}
    if endpoint := get_str(spec, "rdzvEndpoint"):
        current["etcd"] = {"endpoint": endpoint}
    if (replicas := get_int(worker, "replicas")) is not None:
        current = {"replicas": replicas, "maxReplicas": replicas, **current}
    if get_str(worker, "restartPolicy") == "Never":
        current = {"backoffLimit": 0, **current}
    template = get_dict(worker, "template")
    metadata = {key: value for key, value in get_dict(template, "metadata").items() if key not in _WITHOUT_EFFECT}
    pod = {key: value for key, value in get_dict(template, "spec").items() if key != "restartPolicy"}
    if containers := get_dicts(pod, "containers"):
        named = {get_str(container, "name"): container for container in containers}
        own = named.get(WORKER) or named.get(_FORMER_WORKER) or containers[0]
        container, fields = _of_launcher(own)
        pod["containers"] = [container if each is own else each for each in containers]
        current |= fields
    current["template"] = {"metadata": metadata, "spec": pod} if metadata else {"spec": pod}
    return current


def _of_launcher(own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the job's own container in the current form, and the spec's fields for its flags or a reason."""
    current = {**own, "name": WORKER}
    command, args = ([str(word) for word in get_list(own, key)] for key in ("command", "args"))
    before = after_launcher(command) if command else ()
    if before is None:
        return current, {
            "unsupportedReason": f"the container {get_str(own, 'name')} of spec.replicaSpecs.Worker has the command "
            f"{shown(command)}, to which the first controller passed the launcher's flags; this operator "
            "runs the launcher itself: remove the command, and put the program into args"
        }
    current.pop("command", None)
    words = [*before, *args]
    kept: list[str] = []
    fields: dict[str, Any] = {}
    seen = 0
    for flag in launcher_flags(words):
        seen += len(flag.words)
        if flag.name in _FIELDS and re.fullmatch("[0-9]{1,6}", flag.value):
            fields[_FIELDS[flag.name]] = int(flag.value)
        elif flag.name == "nproc-per-node" and flag.value in ("auto", "cpu", "gpu"):
            fields["nprocPerNode"] = flag.value
        elif flag.name not in _OPERATORS:
            kept += flag.words
    return {**current, "args": [*kept, *words[seen:]]}, fields


_SWITCHES: Final = frozenset(
    {"m", "module", "no-python", "prefix", "run-path", "standalone", "warm-spare", "use-env", "virtual-local-rank"}
)
"""Flags without a value."""

_KNOWN: Final = (
    _SWITCHES
    | _OPERATORS
    | _FIELDS.keys()
    | {"help", "metrics-port", "node-name", "notice", "shutdown-timeout", "termination-log", "version"}
)
"""Flags that the operator looks for. Launchers accept any unambiguous prefix of a flag."""

_LONGEST_START: Final = 8
"""Maximum number of words of a launcher at the start of a command."""

_LAUNCHER_MODULES: Final = frozenset(
    {"torch.distributed.launch", "torch.distributed.run", "torchelastic.distributed.launch", "torchelastic.run"}
)
_LAUNCHER: Final = re.compile(
    r"(?:\S*/)?(?:torchrun|torchelastic-run|python[0-9.]*\s+(?:-\w+\s+)*-\w*m\s*"
    rf"(?:{'|'.join(map(re.escape, sorted(_LAUNCHER_MODULES)))}))"
)
_SHELLS: Final = frozenset({"ash", "bash", "dash", "ksh", "sh", "zsh"})
_SCRIPT_FLAG: Final = re.compile(r"-[A-Za-z]*c")
"""A word of shell flags that ends in ``c``, such as ``-lc``; the script is the next word."""
_COMMANDS: Final = re.compile(r"[;&|\n]|(?<!\$)[({]")  # a command in $( ) only produces output
"""A separator between the commands of a script. Quotes and escapes are not interpreted."""

_STARTS_LAUNCHER: Final = re.compile(
    r"\s*(?:(?:!|do|else|exec|if|nohup|then|time|while)\s+|[A-Za-z_]\w*=\S*\s+)*"
    rf"{_LAUNCHER.pattern}(?:\s|$)"
)
"""A launcher at the start of a command. Scripts may be long, so the match must take linear time."""


@dataclass(frozen=True, slots=True)
class LauncherFlag:
    """A flag that precedes the program in a launcher's arguments.

    Attributes:
        name: the full name without leading dashes and with ``-`` for ``_``, such as nproc-per-node or m.
        value: the value; empty for a switch, or if the value is missing.
        words: the flag as written, in one or two words.
    """

    name: str
    value: str
    words: tuple[str, ...]


def launcher_flags(words: Sequence[str]) -> Iterator[LauncherFlag]:
    """Yield the flags at the beginning of a launcher's arguments; the program, or ``--``, follows them."""
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-", "--"):
        word = words[position]
        long = word.startswith("--")
        written, equals, value = word.partition("=") if long else (word[:2], word[2:], word[2:].removeprefix("="))
        name = written.lstrip("-").replace("_", "-")
        if long and name not in _KNOWN:
            begun = [known for known in _KNOWN if known.startswith(name)]
            name = begun[0] if len(begun) == 1 else name
        taken = words[position : position + 1 if equals or name in _SWITCHES else position + 2]
        if len(taken) > 1:
            value = taken[1]
        yield LauncherFlag(name, value, tuple(taken))
        position += len(taken)


def after_launcher(command: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words after the launcher in a command that begins with one; None for other commands."""
    for end in range(1, min(len(command), _LONGEST_START) + 1):
        if _LAUNCHER.fullmatch(" ".join(command[:end])):
            return tuple(command[end:])
    return None


def starts_launcher(command: Sequence[str]) -> bool:
    """Return whether a command is a launcher, or a shell with a script that starts one."""
    if command and command[0].rpartition("/")[2] in _SHELLS:
        for flag, script in itertools.pairwise(command[1:]):
            if _SCRIPT_FLAG.fullmatch(flag):
                return any(map(_STARTS_LAUNCHER.match, _COMMANDS.split(script)))
    return after_launcher(command) is not None


def program_is_launcher(args: Sequence[str]) -> bool:
    """Return whether a launcher with these arguments would start another launcher."""
    flags = list(launcher_flags(args))
    program = list(args[sum(len(flag.words) for flag in flags) :])
    if program[:1] == ["--"]:
        program.pop(0)
    if any(flag.name in ("m", "module") for flag in flags):
        return bool(program) and program[0] in _LAUNCHER_MODULES
    return starts_launcher(program)
