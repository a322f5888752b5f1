"""A worker's pod: the template, completed with the fields of the job and with defaults."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.api.spec import CheckpointSpec, EtcdSpec, GangScheduler, SchedulingSpec
from elastic_operator.api.validation import AGENT_TIME, RESERVED, problem_of
from elastic_operator.controller.model import NewPod
from elastic_operator.resources.owned_objects import PodSettings, pod_group
from elastic_operator.resources.worker_pod import GRACE, NOTICE, worker_pod
from tests.support.builders import UID, a_job, size
from torchelastic.config.settings import AgentSettings, RendezvousSettings
from torchelastic.protocol.codec import decode
from torchelastic.protocol.pod import Env
from torchelastic.protocol.records import PROTOCOL_VERSION, ResumeRecord

POD = NewPod(name="digits-1-bcdfg", index=1, size=size(2, generation=3), failures=2)
STORE = "10.96.0.7:2379"


CERTIFICATES = {"/etc/torchelastic/etcd": "etcd-tls"}
"""The mount of the certificates for the job's own etcd."""


def pod_of(template: Any = None, settings: PodSettings | None = None, **spec: Any) -> dict[str, Any]:
    """Return the pod of a job with this template's spec."""
    fields = {"image": "elastic-agent:dev", "args": ("train.py",), **spec}
    job = a_job(template={"spec": template} if template is not None else {}, **fields)
    assert problem_of(job.spec) is None
    return worker_pod(job, POD, settings or PodSettings(), store=STORE)


def worker_of(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the worker container of a pod."""
    (worker,) = [container for container in pod["spec"]["containers"] if container["name"] == "worker"]
    return dict(worker)


def from_worker(template: Any, **more: Any) -> dict[str, Any]:
    """Return the worker container of a pod whose template sets these fields of the container."""
    return worker_of(pod_of({"containers": [{"name": "worker", **template}]}, **more))


def mounts_of(container: dict[str, Any]) -> dict[str, str]:
    """Return the names of the mounted volumes by mount path."""
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_the_pod_of_a_minimal_job() -> None:
    pod = pod_of()
    metadata, spec, container = pod["metadata"], pod["spec"], worker_of(pod)
    assert (metadata["name"], metadata["namespace"]) == ("digits-1-bcdfg", "default")
    assert (
        metadata["labels"].items()
        >= {
            "app.kubernetes.io/instance": "digits",
            "elastic.pytorch.org/job": "digits",
            "elastic.pytorch.org/role": "worker",
            "elastic.pytorch.org/index": "1",
        }.items()
    )
    assert metadata["annotations"] == {
        "kubectl.kubernetes.io/default-container": "worker",
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "9464",
        "prometheus.io/path": "/metrics",
        "elastic.pytorch.org/protocol-version": f"{PROTOCOL_VERSION}",
        "elastic.pytorch.org/failures": "2",
        "elastic.pytorch.org/size": '{"min":1,"max":4,"generation":3,"desired":2,"protocol":1}',
        "elastic.pytorch.org/metrics-port": "9464",
    }
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("ElasticJob", UID, True)
    assert (spec["restartPolicy"], spec["hostname"], spec["terminationGracePeriodSeconds"]) == ("Never", "digits-1", 85)
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert (container["command"], container["args"]) == (["torchelastic-run"], ["train.py"])
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert mounts_of(container) == {"/dev/shm": "dshm", "/tmp": "tmp", "/checkpoints": "checkpoints", **CERTIFICATES}
    assert {"name": "dshm", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    env = env_of(container)
    assert (env["PET_RDZV_ENDPOINT"], env["PET_RDZV_ID"], env["PET_NNODES"]) == (STORE, UID, "1:4")


def test_all_variables_of_the_operator_are_reserved() -> None:
    job = a_job(image="i", args=("x.py",))
    resumed = replace(POD, resume=ResumeRecord(round=7, restarts=2, uncharged_restarts=1))
    env = env_of(worker_of(worker_pod(job, resumed, PodSettings(), store=STORE)))
    only_local = {Env.COMBINED_OUTPUT}  # set by `elasticjob run`
    assert env.keys() - {"PET_PREFIX"} == RESERVED - only_local, "a job may set PET_PREFIX"
    assert decode(env[Env.RESUME].encode(), ResumeRecord) == resumed.resume
    assert Env.RESUME not in env_of(worker_of(pod_of()))


def test_the_variables_of_the_user_come_last() -> None:
    env = ({"name": "LOGS", "value": "/logs/$(TORCHELASTIC_NODE_NAME)"}, {"name": "T", "valueFrom": {"fieldRef": {}}})
    container = from_worker({"env": [{"name": "A", "value": "1"}]}, env=env)
    assert [entry["name"] for entry in container["env"][-3:]] == ["A", "LOGS", "T"]


def test_image_and_program_may_be_in_the_template() -> None:
    container = from_worker({"image": "mine:1", "command": ["python", "-m"], "args": ["train"]}, image=None, args=())
    assert container["image"] == "mine:1"
    assert container["command"] == ["torchelastic-run"]
    assert container["args"] == ["--no-python", "--", "python", "-m", "train"]


def test_the_volume_of_the_spec_has_the_checkpoints() -> None:
    pod = pod_of(checkpoint=CheckpointSpec({"persistentVolumeClaim": {"claimName": "mine"}}))
    assert {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "mine"}} in pod["spec"]["volumes"]
    assert mounts_of(worker_of(pod))["/checkpoints"] == "checkpoints"


# Values of the template are kept


def test_null_is_the_same_as_no_value() -> None:
    pod = pod_of({"enableServiceLinks": None, "securityContext": None, "containers": None, "volumes": None})
    assert pod["spec"] == pod_of()["spec"]


def test_sidecars_keep_their_order_and_are_not_changed() -> None:
    sidecar = {"name": "log", "image": "fluent"}
    spec = pod_of({"containers": [sidecar, {"name": "worker"}, {"name": "last"}]})["spec"]
    assert [container["name"] for container in spec["containers"]] == ["log", "worker", "last"]
    assert spec["containers"][0] == sidecar
    alone = pod_of({"containers": [sidecar]})["spec"]
    assert [container["name"] for container in alone["containers"]] == ["worker", "log"]


@pytest.mark.parametrize("folder", ["/dev/shm", "/dev/shm/", "/tmp", "/checkpoints"])
def test_a_folder_that_the_template_mounts_is_not_mounted_again(folder: str) -> None:
    pod = pod_of(
        {
            "volumes": [{"name": "mine", "emptyDir": {"sizeLimit": "8Gi"}}],
            "containers": [{"name": "worker", "volumeMounts": [{"name": "mine", "mountPath": folder}]}],
        }
    )
    mounts = mounts_of(worker_of(pod))
    assert {path.rstrip("/") for path in mounts} == {"/dev/shm", "/tmp", "/checkpoints", *CERTIFICATES}
    assert mounts[folder] == "mine"
    assert {volume["name"] for volume in pod["spec"]["volumes"]} == set(mounts.values())


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        (
            {"readOnlyRootFilesystem": True, "capabilities": {"add": ["IPC_LOCK"]}},
            {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]},
            },
        ),
        (
            {"allowPrivilegeEscalation": True, "capabilities": {"drop": ["NET_RAW"]}},
            {"allowPrivilegeEscalation": True, "capabilities": {"drop": ["NET_RAW"]}},
        ),
        # The API server refuses these settings together with allowPrivilegeEscalation: false.
        ({"privileged": True}, {"privileged": True, "capabilities": {"drop": ["ALL"]}}),
        (
            {"capabilities": {"add": ["CAP_SYS_ADMIN"]}},
            {"capabilities": {"add": ["CAP_SYS_ADMIN"], "drop": ["ALL"]}},
        ),
    ],
)
def test_the_security_context_of_the_template_is_completed(given: dict[str, Any], merged: dict[str, Any]) -> None:
    assert from_worker({"securityContext": given})["securityContext"] == merged


def test_a_template_volume_with_the_operators_volume_name_is_kept() -> None:
    volumes = [{"name": "tmp", "configMap": {"name": "settings"}}, {"name": "tmp-2", "emptyDir": {}}]
    sidecar = {"name": "log", "volumeMounts": [{"name": "tmp-2", "mountPath": "/tmp"}]}
    pod = pod_of({"volumes": volumes, "containers": [sidecar]})
    assert pod["spec"]["volumes"][:2] == volumes
    assert mounts_of(worker_of(pod))["/tmp"] == "tmp-3"


# Ports and times

PORT_80 = {"name": "worker", "ports": [{"containerPort": 80}]}


@pytest.mark.parametrize(
    ("template", "settings", "spec", "variable", "ports"),
    [
        ({"hostNetwork": True}, {}, {}, "0", []),
        ({"containers": [PORT_80]}, {"agent_metrics_port": 1234}, {}, "1234", [80, 1234]),
        ({}, {"agent_metrics_port": 0}, {}, "0", []),
        ({"hostNetwork": True}, {"agent_metrics_port": 1234}, {"metrics_port": 77}, "77", [77]),
        ({}, {}, {"metrics_port": 0}, "0", []),
    ],
)
def test_the_jobs_metrics_port_overrides_the_operators_and_host_network_pods_have_no_fixed_port(
    template: dict[str, Any], settings: dict[str, Any], spec: dict[str, Any], variable: str, ports: list[int]
) -> None:
    pod = pod_of(template, PodSettings(**settings), **spec)
    container, annotations = worker_of(pod), pod["metadata"]["annotations"]
    assert env_of(container)[Env.METRICS_PORT] == variable
    assert [port["containerPort"] for port in container.get("ports", ())] == ports
    assert annotations.get("prometheus.io/port") == (str(ports[-1]) if ports else None)


@pytest.mark.parametrize(
    ("spec", "period"),
    [
        ({}, 85),
        ({"args": ("--shutdown_timeout", "60", "x.py")}, 115),
        ({"args": ("--shutdown-timeout=soon", "x.py")}, 85),
        ({"args": ("--shutdown-timeout=inf", "x.py")}, 85),
        ({"args": ("--shutdown-timeout=60",), "command": ("x",)}, 85),
        ({"env": ({"name": "PET_SHUTDOWN_TIMEOUT", "value": "95"},)}, 150),
        ({"env": ({"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "95"},)}, 150),
        (
            {
                "env": (
                    {"name": "PET_SHUTDOWN_TIMEOUT", "value": "60"},
                    {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "95"},
                )
            },
            115,
        ),
        ({"args": ("--notice", "100", "x.py")}, 155),
        ({"env": ({"name": "PET_NOTICE", "value": "0"},)}, 85),
        ({"env": ({"name": "PET_NOTICE", "value": "300"}, {"name": "PET_SHUTDOWN_TIMEOUT", "value": "10"})}, 355),
    ],
)
def test_the_grace_period_of_the_pod_is_longer_than_notice_and_shutdown_timeout(
    spec: dict[str, Any], period: int
) -> None:
    pod = pod_of(**spec)
    assert pod["spec"]["terminationGracePeriodSeconds"] == period
    users = {entry["name"] for entry in spec.get("env", ())} - {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    assert {"PET_NOTICE", "PET_SHUTDOWN_TIMEOUT"} & env_of(worker_of(pod)).keys() == users


@pytest.mark.parametrize(
    ("period", "args", "notice", "grace"),
    [
        (3600, (), "3545", "30"),
        (30, (), "11.25", "11.25"),
        (8, (), "3", "3"),
        (30, ("--notice=20",), None, "2.5"),
        (30, ("--shutdown-timeout=10",), "12.5", None),
        (30, ("--shutdown-timeout=2", "--notice=3"), None, None),
    ],
)
def test_the_grace_period_of_the_template_is_divided_into_notice_and_shutdown_timeout_unless_the_user_sets_them(
    period: int, args: tuple[str, ...], notice: str | None, grace: str | None
) -> None:
    pod = pod_of({"terminationGracePeriodSeconds": period}, args=(*args, "x.py"))
    assert pod["spec"]["terminationGracePeriodSeconds"] == period
    env = env_of(worker_of(pod))
    assert (env.get("PET_NOTICE"), env.get("PET_SHUTDOWN_TIMEOUT")) == (notice, grace)


def test_notice_and_grace_have_the_defaults_of_the_agent() -> None:
    assert AgentSettings.__dataclass_fields__["shutdown_timeout"].default == GRACE
    assert RendezvousSettings.__dataclass_fields__["notice"].default == NOTICE
    assert AGENT_TIME > 0


# Scheduling


def node_tolerations(seconds: int, *taints: str) -> list[dict[str, Any]]:
    """Return the tolerations that evict a pod this number of seconds after its node became unreachable."""
    whole = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
    return [{"key": f"node.kubernetes.io/{taint}", **whole} for taint in taints]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([{"key": "gpu", "operator": "Exists"}], node_tolerations(40, "not-ready", "unreachable")),
        (node_tolerations(7, "not-ready"), node_tolerations(40, "unreachable")),
        ([{"key": "node.kubernetes.io/unreachable", "operator": "Exists"}], node_tolerations(40, "not-ready")),
        (
            [{"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}],
            node_tolerations(40, "not-ready", "unreachable"),
        ),
        ([{"operator": "Exists", "effect": "NoExecute"}], []),
    ],
)
def test_tolerations_of_the_template_take_precedence(given: Any, added: Any) -> None:
    assert pod_of({"tolerations": given}, node_loss=40)["spec"]["tolerations"] == given + added


NOT_THERE = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("node-1", "node-7")]
OTHERS = {"key": "metadata.name", "operator": "In", "values": ["node-2"]}
GPUS = {"key": "gpu", "operator": "Exists"}


def required(*terms: Any) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        (None, required({"matchFields": NOT_THERE})),
        ({"podAffinity": {}}, {"podAffinity": {}, **required({"matchFields": NOT_THERE})}),
        (
            required({"matchExpressions": [GPUS]}, {"matchFields": [OTHERS]}, {}),
            required({"matchExpressions": [GPUS], "matchFields": NOT_THERE}, {"matchFields": [OTHERS, *NOT_THERE]}, {}),
        ),
        (required(), required()),
        ({"nodeAffinity": 7}, {"nodeAffinity": 7}),
    ],
)
def test_excluded_nodes_are_added_to_the_affinity(given: Any, merged: Any) -> None:
    template = {"spec": {"affinity": given}} if given is not None else {}
    before = copy.deepcopy(template)
    job = a_job(image="i", args=("x.py",), template=template)
    new = replace(POD, excluded=("node-7", "node-1"))
    assert worker_pod(job, new, PodSettings(), store=STORE)["spec"]["affinity"] == merged
    assert template == before


PLUGINS, VOLCANO = GangScheduler.SCHEDULER_PLUGINS, GangScheduler.VOLCANO


@pytest.mark.parametrize(
    ("gang", "scheduler", "mark", "version", "more"),
    [
        (
            *(PLUGINS, "scheduler-plugins-scheduler", ("labels", "scheduling.x-k8s.io/pod-group")),
            *("scheduling.x-k8s.io/v1alpha1", {}),
        ),
        (
            *(VOLCANO, "volcano", ("annotations", "scheduling.k8s.io/group-name")),
            *("scheduling.volcano.sh/v1beta1", {"queue": "team", "priorityClassName": "high"}),
        ),
    ],
)
def test_the_pods_of_a_gang_name_the_scheduler_and_the_group_which_has_the_policy_of_the_job(
    gang: GangScheduler, scheduler: str, mark: tuple[str, str], version: str, more: dict[str, str]
) -> None:
    policy = SchedulingSpec(gang=gang, priority_class="high", queue="team")
    group = pod_group(a_job(scheduling=policy), gang, 3)
    assert (group["apiVersion"], group["spec"]) == (version, {"minMember": 3, **more})
    pod = pod_of(scheduling=policy)
    assert (pod["spec"]["schedulerName"], pod["spec"]["priorityClassName"]) == (scheduler, "high")
    kind, key = mark
    assert pod["metadata"][kind][key] == "digits"
    for other in (gang, None):
        custom = pod_of(scheduling=SchedulingSpec(gang=other, scheduler_name="mine"))
        assert custom["spec"]["schedulerName"] == "mine"


def test_the_credentials_for_etcd_are_mounted_read_only() -> None:
    pod = pod_of(etcd=EtcdSpec(endpoint="https://etcd:2379", tls_secret="hub"))
    container = worker_of(pod)
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/etc/torchelastic/etcd"]
    assert mount["readOnly"] is True
    assert {"name": mount["name"], "secret": {"secretName": "hub"}} in pod["spec"]["volumes"]
    assert env_of(container)[Env.ETCD_TLS] == "/etc/torchelastic/etcd"


# Any template

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
OF_CONTAINERS = ("securityContext", "volumeMounts", "ports", "env", "args", "resources", "terminationMessagePath")
CONTAINERS = st.fixed_dictionaries(
    {"name": st.sampled_from(["worker", "log"])}, optional=dict.fromkeys(OF_CONTAINERS, JSON)
)
OF_PODS = ("volumes", "securityContext", "hostNetwork", "affinity", "tolerations", "schedulerName", "unheard_of")
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(OF_PODS, JSON),
    "containers": JSON | st.lists(CONTAINERS, max_size=3),
}
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": JSON | st.fixed_dictionaries({}, optional={"labels": JSON, "annotations": JSON}),
        "spec": JSON | st.fixed_dictionaries({}, optional=FIELDS),
    },
)


def is_contained(given: Any, found: Any) -> bool:
    """Return whether ``found`` contains everything in ``given``; ``found`` may have more. Null counts as absent."""
    if isinstance(given, dict) and isinstance(found, dict):
        return all(is_contained(value, found.get(key)) for key, value in given.items())
    if isinstance(given, list) and isinstance(found, list):
        rest = iter(found)
        return all(any(is_contained(item, candidate) for candidate in rest) for item in given)
    return given is None or bool(given == found)


@given(template=TEMPLATES)
def test_any_template_gives_a_pod_and_is_unchanged_and_a_valid_one_keeps_its_values(template: dict[str, Any]) -> None:
    before = copy.deepcopy(template)
    job = a_job(image="i", args=("x.py",), template=template)
    pod = worker_pod(job, replace(POD, excluded=("node-1",)), PodSettings(), store=STORE)
    assert (pod["kind"], template) == ("Pod", before)
    if problem_of(job.spec) is None:
        assert is_contained(template.get("spec"), pod["spec"])
        assert is_contained(template.get("metadata"), pod["metadata"])
