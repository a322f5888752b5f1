"""The Helm chart on a real API server: installed, upgraded, removed, and with invalid values."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml

from elastic_operator.api.constants import LABEL_JOB, LABEL_ROLE, ROLE_WORKER, worker_selector
from elastic_operator.kubernetes.client import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    ELASTIC_JOBS,
    EVENTS,
    NETWORK_POLICIES,
    PODS,
    SCHEDULER_PLUGINS_GROUPS,
    SERVICES,
    VOLCANO_GROUPS,
)
from testbed.control_plane import ControlPlane
from tests.support.definitions import pod_groups_defined
from tests.support.operator_namespace import OperatorNamespace, conditions, holds, index_of, live, run_keys
from tests.support.prometheus import prometheus_command, promtool
from tests.support.watching_api import WatchingApi
from torchelastic.protocol.codec import encode
from torchelastic.protocol.records import HistoryRecord, PastRound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from elastic_operator.kubernetes.client import Resource
    from testbed.cluster import Result
    from tests.support.etcd import EtcdServer

CERTIFICATE = "elastic.pytorch.org/certificate"

pytestmark = [pytest.mark.control_plane, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts"
CRD = "elasticjobs.elastic.pytorch.org"
RELEASE = "elastic-operator"
OPERATOR = Path(sys.executable).with_name("elastic-operator")
Right = tuple[str, str, str, str]
"""An API group, a resource, a verb, and the name of the permitted object, which is empty for all objects."""


Target = dict[str, str]
"""The discovery labels of one port of a pod, or of a container without ports."""


def target(container: str, port: str, address: str, labels: Target) -> Target:
    """Return the discovery labels of a port, ``name:number``, or of a container that declares none."""
    name, _, number = port.partition(":")
    about = {"pod_name": "a-pod", "namespace": "team", "pod_ip": address.strip("[]"), "pod_container_name": container}
    about |= {"pod_container_port_name": name, "pod_container_port_number": number} if number else {}
    where = f"{address}:{number}" if number else address
    return {"__address__": where, **{f"__meta_kubernetes_{key}": value for key, value in (about | labels).items()}}


def annotated(port: str) -> Target:
    """Return the discovery labels for the annotations of a pod that serves metrics on this port."""
    return {"pod_annotation_prometheus_io_scrape": "true", "pod_annotation_prometheus_io_port": port}


def worker(port: str) -> Target:
    """Return the discovery labels of a worker pod; without a port, its agent does not serve metrics yet."""
    own = {"pod_label_elastic_pytorch_org_role": "worker", "pod_label_app_kubernetes_io_name": "elasticjob"}
    return own | ({**annotated(port), "pod_annotation_elastic_pytorch_org_metrics_port": port} if port else {})


WORKERS = [
    *(target("worker", port, "10.0.0.1", worker("9464")) for port in ("http:80", "metrics:9464")),
    target("proxy", "", "10.0.0.1", worker("9464")),
    # This pod is on the network of its node.
    target("worker", "", "[fd00::1]", worker("40123")),
    target("proxy", "http:80", "[fd00::1]", worker("40123")),
    # This pod has not started yet.
    target("worker", "", "10.0.0.2", worker("")),
]
OTHERS = [
    target(
        "operator",
        "metrics:8080",
        "10.0.0.9",
        {"pod_label_app_kubernetes_io_name": "elastic-operator", **annotated("8080")},
    ),
    target("web", "http:80", "10.0.0.8", annotated("80")),
]


def scraped(folder: Path, rules: list[Any], found: list[Target]) -> list[str]:
    """Return the addresses that Prometheus scrapes among these targets with these relabelling rules."""
    targets = folder / "targets.json"
    targets.write_text(json.dumps([{"targets": [each["__address__"]], "labels": each} for each in found]))
    scrape = {"job_name": "elastic", "file_sd_configs": [{"files": [str(targets)]}], "relabel_configs": rules}
    prometheus_command(folder, 0, [scrape])
    checked = promtool("check", "service-discovery", "--timeout=3s", folder / "prometheus.yml", "elastic")
    # Prometheus merges targets with the same labels.
    kept = {frozenset(each["labels"].items()) for each in json.loads(checked.stdout) if each.get("labels")}
    return sorted(dict(labels)["__address__"] for labels in kept)


AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


class AuditLog:
    """The audit log of an API server that is started with :attr:`flags`.

    Args:
        folder: the folder of the log.
    """

    def __init__(self, folder: Path) -> None:
        self._policy = folder / "audit-policy.json"
        self._log = folder / "audit.log"

    @property
    def flags(self) -> Sequence[str]:
        """The flags of the API server."""
        self._policy.write_text(json.dumps(AUDIT_POLICY))
        return (f"--audit-policy-file={self._policy}", f"--audit-log-path={self._log}")

    def used(self, namespace: str, account: str) -> set[tuple[str, str, str]]:
        """Return the permitted requests of a service account, as group, resource and verb."""
        return {what for what, allowed in self._asked(namespace, account) if allowed}

    def refused(self, namespace: str, account: str) -> set[tuple[str, str, str]]:
        """Return the denied requests of a service account, as group, resource and verb."""
        return {what for what, allowed in self._asked(namespace, account) if not allowed}

    def _asked(self, namespace: str, account: str) -> Iterator[tuple[tuple[str, str, str], bool]]:
        user = f"system:serviceaccount:{namespace}:{account}"
        for line in self._log.read_text().splitlines():
            entry = json.loads(line)
            about = entry.get("objectRef")
            if about is None or entry["user"]["username"] != user or "impersonatedUser" in entry:
                continue
            resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
            allowed = entry["annotations"]["authorization.k8s.io/decision"] == "allow"
            yield (about.get("apiGroup", ""), resource, entry["verb"]), allowed


class Helm:
    """A user of helm and kubectl, in one namespace that admits only restricted pods."""

    def __init__(self, cluster: ControlPlane, namespace: str, audit: AuditLog) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.audit = audit

    async def __call__(self, *words: str, check: bool = True) -> Result:
        """Run helm."""
        return await self.cluster.run("helm", "--namespace", self.namespace, *words, check=check)

    async def kubectl(self, *words: str, check: bool = True, stdin: str | None = None) -> Result:
        """Run kubectl."""
        return await self.cluster.kubectl("--namespace", self.namespace, *words, check=check, stdin=stdin)

    async def get(self, *what: str) -> dict[str, Any]:
        """Return an object or a list of objects."""
        found: dict[str, Any] = json.loads((await self.kubectl("get", *what, "-o", "json")).stdout)
        return found

    async def rights(self, *, of: str, namespace: str) -> set[Right]:
        """Return the permissions of a service account in a namespace, beyond those of every user."""
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        }
        who = f"system:serviceaccount:{self.namespace}:{of}"
        # Client-side validation needs a permission that the account lacks; the server also validates.
        words = ("create", "-f", "-", "-o", "json", "--validate=false", f"--as={who}")
        answer = await self.kubectl(*words, stdin=json.dumps(review))
        return {
            (group, resource, verb, name)
            for rule in json.loads(answer.stdout)["status"]["resourceRules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
            for name in rule.get("resourceNames", [""])
            if group not in ("authorization.k8s.io", "authentication.k8s.io")
        }


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> AuditLog:
    """The audit log of the API server for these tests."""
    return AuditLog(tmp_path_factory.mktemp("audit"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, audit: AuditLog) -> AsyncIterator[ControlPlane]:
    """A control plane for these tests only, because the tests install and remove cluster-wide objects."""
    flags = {"kube-apiserver": audit.flags}
    async with ControlPlane(tmp_path_factory.mktemp("control-plane"), flags=flags) as control_plane:
        yield control_plane


@pytest_asyncio.fixture(loop_scope="module")
async def helm(cluster: ControlPlane, audit: AuditLog) -> AsyncIterator[Helm]:
    """Helm in its own namespace; its releases are uninstalled after the test."""
    async with cluster.namespace(**{"pod-security.kubernetes.io/enforce": "restricted"}) as namespace:
        helm = Helm(cluster, namespace, audit)
        yield helm
        for release in (await helm("list", "--short")).stdout.split():
            await helm("uninstall", release)
        await cluster.kubectl("delete", "crd", CRD, "--ignore-not-found")


@pytest.fixture
def own_chart(tmp_path: Path) -> Path:
    """A copy of the chart that a test may change, with the CRD itself instead of the link."""
    return Path(shutil.copytree(CHART, tmp_path / "chart"))


async def rendered(helm: Helm, *words: str, chart: Path = CHART) -> list[dict[str, Any]]:
    """Return all objects that the chart renders, without those of `helm test`."""
    text = (await helm("template", RELEASE, str(chart), "--kube-version=1.30.0", "--no-hooks", *words)).stdout
    return [found for found in yaml.safe_load_all(text) if found]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the objects of a kind."""
    return [found for found in objects if found["kind"] == kind]


async def test_the_chart_passes_lint_and_refuses_a_cluster_version_below_the_minimum(helm: Helm) -> None:
    result = await helm("lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in result.stdout
    assert "WARNING" not in result.stdout
    result = await helm("template", str(CHART), "--kube-version=1.29.9", check=False)
    assert result.returncode != 0
    assert "requires kubeVersion: >=1.30.0-0" in result.stderr
    assert await rendered(helm, "--kube-version=1.30.0-gke.1")


async def test_the_packaged_chart_contains_the_crd(helm: Helm, tmp_path: Path) -> None:
    source = yaml.safe_load((ROOT / "crds" / "elasticjob.yaml").read_text())
    await helm("package", str(CHART), "--destination", str(tmp_path))
    for chart in (CHART, *tmp_path.glob("*.tgz")):
        [definition] = of_kind(await rendered(helm, chart=chart), "CustomResourceDefinition")
        assert definition["spec"] == source["spec"]
        assert definition["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert definition["metadata"].pop("labels")["app.kubernetes.io/managed-by"] == "Helm"
        assert definition["metadata"] == source["metadata"]


async def test_a_chart_without_its_crd_link_is_reported(helm: Helm, own_chart: Path) -> None:
    # This is a checkout on a system without symbolic links.
    (own_chart / "crd" / "elasticjob.yaml").write_text("../../crds/elasticjob.yaml")
    result = await helm("template", str(own_chart), "--kube-version=1.30.0", check=False)
    assert result.returncode != 0
    assert "it is a symbolic link that was lost during a copy. Use a packaged chart" in result.stderr
    assert await rendered(helm, "--set=crds.install=false", chart=own_chart)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("replica=2", "additional properties 'replica' not allowed"),
        ("replicas=two", "/replicas.*got string, want integer"),
        ("podLabels.a=1", "/podLabels/a.*got number, want string"),
        ("logging.level=verbose", "/logging/level.*'debug', 'info', 'warning', 'error'"),
        ("replicas=2,leaderElection=false", "all copies would act at once: set leaderElection=true or replicas=1"),
        ("serviceAccount.create=false", "serviceAccount.name must name the one that the operator uses"),
    ],
)
async def test_invalid_values_are_refused_in_one_sentence(helm: Helm, setting: str, words: str) -> None:
    result = await helm("install", RELEASE, str(CHART), f"--set={setting}", check=False)
    assert result.returncode != 0
    assert re.search(words, result.stderr)
    assert (await helm("list", "--short")).stdout == ""


def at(path: str, objects: list[dict[str, Any]]) -> Any:
    """Return the value at a path such as ``Deployment spec replicas`` in the first object of this kind, or None."""
    kind, *keys = path.split()
    found: Any = next(iter(of_kind(objects, kind)), None)
    for key in keys:
        found = found[int(key)] if isinstance(found, list) else found.get(key)
    return found


POD = "Deployment spec template"
CONTAINER = f"{POD} spec containers 0"
SCRAPED = {"prometheus.io/scrape": "true", "prometheus.io/port": "8080", "prometheus.io/path": "/metrics"}
AFFINITY = "preferredDuringSchedulingIgnoredDuringExecution"
MONITORS = (
    "--set=monitoring.monitors.enabled=true,monitoring.monitors.interval=15s,monitoring.monitors.labels.release=mine"
)
EFFECTS: dict[tuple[str, ...], dict[str, Any]] = {
    (): {
        f"{POD} metadata annotations": SCRAPED,
        f"{POD} spec affinity": None,
        "NetworkPolicy spec ingress": [{"ports": [{"port": 8080, "protocol": "TCP"}]}],
        f"{POD} spec topologySpreadConstraints": None,
        **dict.fromkeys(
            ("PodDisruptionBudget", "PodMonitor", "ServiceMonitor", "PrometheusRule", "ConfigMap", "Service"), None
        ),
    },
    (
        "--set=image.repository=registry.example.org/operator,image.tag=1.2,image.pullPolicy=Always,etcd.image=etcd:1",
        "--set=agent.metricsPort=9999,logging.level=debug,logging.format=json,resources.limits.cpu=2,replicas=2",
        "--set=imagePullSecrets[0].name=key,runAsUser=1000650000,nodeSelector.g=h,tolerations[0].operator=Exists",
        "--set=priorityClassName=high,podLabels.c=d,podAnnotations.e=f",
        "--set=serviceAccount.name=me,serviceAccount.annotations.a=b",
    ): {
        "ServiceAccount metadata name": "me",
        "ServiceAccount metadata annotations": {"a": "b"},
        "ClusterRoleBinding subjects 0 name": "me",
        "RoleBinding subjects 0 name": "me",
        "Deployment spec replicas": 2,
        f"{POD} metadata annotations": {"e": "f", **SCRAPED},
        f"{POD} metadata labels c": "d",
        f"{POD} spec affinity podAntiAffinity {AFFINITY} 0 podAffinityTerm topologyKey": "kubernetes.io/hostname",
        f"{POD} spec topologySpreadConstraints 0 topologyKey": "topology.kubernetes.io/zone",
        "PodDisruptionBudget spec maxUnavailable": 1,
        f"{POD} spec serviceAccountName": "me",
        f"{POD} spec imagePullSecrets": [{"name": "key"}],
        f"{POD} spec securityContext runAsUser": 1000650000,
        f"{POD} spec securityContext runAsGroup": 1000650000,
        f"{POD} spec nodeSelector": {"g": "h"},
        f"{POD} spec tolerations": [{"operator": "Exists"}],
        f"{POD} spec priorityClassName": "high",
        f"{CONTAINER} image": "registry.example.org/operator:1.2",
        f"{CONTAINER} imagePullPolicy": "Always",
        f"{CONTAINER} args": {
            "--etcd-image=etcd:1",
            "--agent-metrics-port=9999",
            "--log-level=debug",
            "--log-format=json",
        },
        f"{CONTAINER} resources limits": {"memory": "512Mi", "cpu": 2},
    },
    ("--set=replicas=2,runAsUser=null", f"--set-json=affinity.podAffinity.{AFFINITY}=[]"): {
        f"{POD} spec affinity": {"podAffinity": {AFFINITY: []}},
        f"{POD} spec securityContext runAsUser": None,
        f"{POD} spec securityContext runAsGroup": None,
    },
    ("--set-string=podAnnotations.prometheus\\.io/scrape=false",): {
        f"{POD} metadata annotations": {**SCRAPED, "prometheus.io/scrape": "false"},
    },
    ("--set=monitoring.annotations=false",): {f"{POD} metadata annotations": None},
    (MONITORS,): {
        "PodMonitor metadata labels release": "mine",
        "PodMonitor spec namespaceSelector": {"any": True},
        "PodMonitor spec selector": {"matchLabels": {LABEL_ROLE: ROLE_WORKER}},
        "PodMonitor spec podMetricsEndpoints 0 interval": "15s",
        "ServiceMonitor metadata labels release": "mine",
        "ServiceMonitor spec endpoints": [{"port": "metrics", "interval": "15s"}],
        "Service spec ports": [{"name": "metrics", "port": 8080, "targetPort": "metrics"}],
        f"{CONTAINER} ports": [{"name": "metrics", "containerPort": 8080}],
    },
    ("--set=topologySpreadConstraints[0].maxSkew=2",): {f"{POD} spec topologySpreadConstraints": [{"maxSkew": 2}]},
    ("--set=networkPolicies.metricsNamespaces={prom}",): {
        "NetworkPolicy spec podSelector matchLabels": {
            "app.kubernetes.io/name": RELEASE,
            "app.kubernetes.io/instance": RELEASE,
        },
        "NetworkPolicy spec ingress 0 ports": [{"port": 8080, "protocol": "TCP"}],
        "NetworkPolicy spec ingress 0 from 0 namespaceSelector matchLabels": {"kubernetes.io/metadata.name": "prom"},
        f"{CONTAINER} args": {"--metrics-namespace=prom"},
    },
    ("--set=networkPolicies.enabled=false",): {
        "NetworkPolicy": None,
        f"{CONTAINER} args": {"--no-network-policies"},
    },
    (MONITORS, "--set=namespaces={one,two}"): {"PodMonitor spec namespaceSelector": {"matchNames": ["one", "two"]}},
    (
        "--set=monitoring.dashboards.enabled=true,monitoring.dashboards.label=show",
        "--set-string=monitoring.dashboards.labelValue=on",
    ): {"ConfigMap metadata labels show": "on"},
}
"""The fields of the chart's objects that result from each setting of values; a set names some items of a list."""


@pytest.mark.parametrize(("words", "effects"), EFFECTS.items(), ids=[" ".join(each) for each in EFFECTS])
async def test_the_chart_values_take_effect(helm: Helm, words: tuple[str, ...], effects: dict[str, Any]) -> None:
    objects = await rendered(helm, *words)
    for path, wanted in effects.items():
        found = at(path, objects)
        assert wanted <= {*found} if isinstance(wanted, set) else found == wanted, path


async def test_deployment_service_and_monitor_select_the_labels_of_the_operator(helm: Helm) -> None:
    objects = await rendered(helm, MONITORS, "--set=podLabels.c=d")
    [monitor], [service], [deployment] = (
        of_kind(objects, kind) for kind in ("ServiceMonitor", "Service", "Deployment")
    )
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= labels
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels


@pytest.mark.prometheus
async def test_prometheus_operator_finds_each_agent_once_at_its_annotated_port(helm: Helm, tmp_path: Path) -> None:
    [agents] = of_kind(await rendered(helm, "--set=monitoring.monitors.enabled=true"), "PodMonitor")
    [endpoint] = agents["spec"]["podMetricsEndpoints"]
    own_words = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    rules = [{own_words.get(key, key): value for key, value in rule.items()} for rule in endpoint["relabelings"]]
    assert scraped(tmp_path, rules, WORKERS) == ["10.0.0.1:9464", "[fd00::1]:40123"]


@pytest.mark.prometheus
async def test_a_prometheus_configured_as_documented_finds_each_agent_and_the_operator_once(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    [documented] = re.findall(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL)
    [job] = yaml.safe_load(documented)["scrape_configs"]
    found = scraped(tmp_path, job["relabel_configs"], WORKERS + OTHERS)
    assert found == ["10.0.0.1:9464", "10.0.0.9:8080", "[fd00::1]:40123"]


async def test_service_names_stay_within_the_limit(helm: Helm) -> None:
    release = "team-a" * 8 + "-long"
    words = ("template", release, str(CHART), "--kube-version=1.30.0", "--set=monitoring.monitors.enabled=true")
    objects = [found for found in yaml.safe_load_all((await helm(*words)).stdout) if found]
    names = sorted(service["metadata"]["name"] for service in of_kind(objects, "Service"))
    assert [name.rpartition("-")[2] for name in names] == ["metrics", "test"]
    assert max(map(len, names)) <= 63


async def test_the_charts_alerts_match_the_file_and_link_to_the_given_runbooks(helm: Helm) -> None:
    words = "--set=monitoring.rules.enabled=true,monitoring.rules.labels.release=mine"
    plain = yaml.safe_load((CHART / "alerts" / "elasticjobs.yaml").read_text())
    [rule] = of_kind(await rendered(helm, words), "PrometheusRule")
    assert rule["spec"] == plain
    assert rule["metadata"]["labels"]["release"] == "mine"
    [rule] = of_kind(
        await rendered(helm, words, "--set=monitoring.rules.runbooks=https://wiki/alerts/"), "PrometheusRule"
    )
    for group in plain["groups"]:
        for alert in group["rules"]:
            alert["annotations"]["runbook_url"] = f"https://wiki/alerts/{alert['alert']}.md"
    assert rule["spec"] == plain


async def test_dashboards_are_created_where_the_grafana_sidecar_looks(helm: Helm, tmp_path: Path) -> None:
    words = "--set=monitoring.dashboards.enabled=true,monitoring.dashboards.annotations.grafana_folder=Training"
    await helm("package", str(CHART), "--destination", str(tmp_path))
    for chart in (CHART, *tmp_path.glob("*.tgz")):
        maps = of_kind(await rendered(helm, words, chart=chart), "ConfigMap")
        files = {name: text for found in maps for name, text in found["data"].items()}
        for found in maps:
            assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
            assert found["metadata"]["annotations"] == {"grafana_folder": "Training"}
        assert {name: json.loads(text) for name, text in files.items()} == {
            f"elasticjobs-{page.name}": json.loads(page.read_text()) for page in (CHART / "dashboards").iterdir()
        }


async def test_a_release_image_is_tagged_with_the_version_and_a_clones_image_with_dev(
    helm: Helm, own_chart: Path
) -> None:
    about = own_chart / "Chart.yaml"
    for version, tag in (("0.1.0.dev0", "dev"), ("0.1.0rc1", "0.1.0rc1"), ("0.1.0", "0.1.0")):
        about.write_text(re.sub(r"appVersion: .*", f"appVersion: {version}", about.read_text()))
        [deployment] = of_kind(await rendered(helm, chart=own_chart), "Deployment")
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"elastic-operator:{tag}"


async def test_install_upgrade_uninstall_and_reinstall_work(helm: Helm) -> None:
    output = (await helm("install", RELEASE, str(CHART))).stdout
    assert "kubectl apply -f examples/digits.yaml" in output
    assert "kind load docker-image elastic-operator:dev elastic-agent:dev" in output
    # The operator's pod is created in a namespace that admits only restricted pods.
    await helm.kubectl("wait", f"deployment/{RELEASE}", "--for=jsonpath={.status.replicas}=1", "--timeout=60s")
    await helm.kubectl("wait", f"crd/{CRD}", "--for=condition=Established", "--timeout=60s")
    await helm.kubectl("apply", "-f", str(ROOT / "examples" / "digits.yaml"))

    await helm("upgrade", RELEASE, str(CHART), "--set=podLabels.upgraded=yes,replicas=2")
    template = (await helm.get(f"deployment/{RELEASE}"))["spec"]["template"]
    assert template["metadata"]["labels"]["upgraded"] == "yes"
    # Disable leader election, and enable it again.
    for election, strategy in (("false", "Recreate"), ("true", "RollingUpdate")):
        await helm("upgrade", RELEASE, str(CHART), f"--set=leaderElection={election}")
        assert (await helm.get(f"deployment/{RELEASE}"))["spec"]["strategy"]["type"] == strategy

    output = (await helm("uninstall", RELEASE)).stdout
    assert f"[CustomResourceDefinition] {CRD}" in output
    assert (await helm.get("elasticjob/digits"))["spec"]["replicas"] == 2
    left = await helm.kubectl(
        "get", "deployments,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings", "-o", "name",
        "-l", f"app.kubernetes.io/name={RELEASE}",
    )  # fmt: skip
    assert left.stdout == ""

    # Only a release of the same name adopts the remaining CRD.
    refused = await helm("install", "other", str(CHART), check=False)
    assert refused.returncode != 0
    assert f'CustomResourceDefinition "{CRD}" in namespace "" exists and cannot be imported' in refused.stderr
    await helm("install", RELEASE, str(CHART))
    await helm("uninstall", RELEASE)
    await helm("install", "other", str(CHART), "--take-ownership")
    assert (await helm.get("elasticjob/digits"))["spec"]["replicas"] == 2


async def test_the_pod_of_helm_test_is_admitted_and_reaches_the_operator(helm: Helm) -> None:
    metrics = "--set=networkPolicies.metricsNamespaces={monitoring}"
    words = ("template", RELEASE, str(CHART), "--kube-version=1.30.0", metrics)
    objects = [found for found in yaml.safe_load_all((await helm(*words)).stdout) if found]
    [pod], [service], [policy], [deployment] = (
        of_kind(objects, kind) for kind in ("Pod", "Service", "NetworkPolicy", "Deployment")
    )
    operators = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= operators
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    sources = [each["podSelector"] for each in policy["spec"]["ingress"][0]["from"] if "podSelector" in each]
    assert sources == [{"matchLabels": pod["metadata"]["labels"]}]
    [container] = pod["spec"]["containers"]
    assert container["image"] == deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    for each in (pod, service):
        applied = await helm.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(each))
        assert (applied.stdout.endswith("created (server dry run)\n"), applied.stderr) == (True, "")


async def test_an_upgrade_installs_the_new_crd_and_an_uninstall_removes_it_if_requested(
    helm: Helm, own_chart: Path
) -> None:
    await helm("install", RELEASE, str(CHART))
    await helm.kubectl("wait", f"crd/{CRD}", "--for=condition=Established", "--timeout=60s")
    await helm.kubectl("apply", "-f", str(ROOT / "examples" / "digits.yaml"))
    file = own_chart / "crd" / "elasticjob.yaml"
    file.write_text(file.read_text().replace("shortNames: [ej]", "shortNames: [ej, elastic]"))
    # The CRD stays although it is no longer part of the release.
    for more in ((), ("--set=crds.install=false",)):
        await helm("upgrade", RELEASE, str(own_chart), *more)
        assert (await helm.get("crd", CRD))["spec"]["names"]["shortNames"] == ["ej", "elastic"]

    await helm("upgrade", RELEASE, str(CHART), "--set=crds.install=true,crds.keep=false")
    await helm("uninstall", RELEASE, "--wait")
    assert (await helm.kubectl("get", "crd", "-o", "name")).stdout == ""


async def test_a_crd_applied_by_others_is_not_changed(helm: Helm) -> None:
    await helm.kubectl("apply", "-f", str(ROOT / "crds"))
    await helm("install", RELEASE, str(CHART), "--set=crds.install=false")
    await helm("uninstall", RELEASE)
    assert "meta.helm.sh/release-name" not in (await helm.get("crd", CRD))["metadata"].get("annotations", {})


async def test_the_operator_has_its_permissions_in_the_listed_namespaces_only(helm: Helm) -> None:
    own_rights = {("coordination.k8s.io", "leases", "create", "")}
    own_rights |= {("", "secrets", "create", ""), ("", "secrets", "get", f"{RELEASE}-etcd")}
    own_rights |= {("coordination.k8s.io", "leases", verb, RELEASE) for verb in ("get", "update")}
    await helm("install", RELEASE, str(CHART))
    jobs_rights = await helm.rights(of=RELEASE, namespace="default")
    assert ("elastic.pytorch.org", "elasticjobs", "watch", "") in jobs_rights
    assert await helm.rights(of=RELEASE, namespace=helm.namespace) == jobs_rights | own_rights

    async with helm.cluster.namespace() as one, helm.cluster.namespace() as other:
        listed = f"--set=namespaces={{{one},{other}}}"
        await helm("upgrade", RELEASE, str(CHART), listed, f"--set=etcd.secretNamespaces={{{one}}}")
        assert await helm.rights(of=RELEASE, namespace=one) == jobs_rights | {("", "secrets", "get", "")}
        assert await helm.rights(of=RELEASE, namespace=other) == jobs_rights
        assert await helm.rights(of=RELEASE, namespace="default") == set()
        assert await helm.rights(of=RELEASE, namespace=helm.namespace) == own_rights
        [container] = (await helm.get(f"deployment/{RELEASE}"))["spec"]["template"]["spec"]["containers"]
        assert f"--etcd-secrets-namespace={one}" in container["args"]
        notes = (await helm("get", "notes", RELEASE)).stdout
        assert f"manages the namespaces {one}, {other}." in notes
        assert f"kubectl -n {one} apply -f examples/digits.yaml" in notes

    await helm("upgrade", RELEASE, str(CHART), "--set=rbac.create=false,leaderElection=false")
    assert await helm.rights(of=RELEASE, namespace=helm.namespace) == set()


@contextlib.asynccontextmanager
async def running_operator(helm: Helm, log: Path) -> AsyncIterator[None]:
    """Run the operator as the Deployment of the release does, with the permissions of its service account."""
    [container] = (await helm.get(f"deployment/{RELEASE}"))["spec"]["template"]["spec"]["containers"]
    kubeconfig = await helm.cluster.kubeconfig_for(helm.namespace, RELEASE)
    arguments = [*container["args"], "--listen=127.0.0.1:0", f"--kubeconfig={kubeconfig}", "--log-level=debug"]
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(OPERATOR, *arguments, stdout=file, stderr=file)
    try:
        yield
        assert process.returncode is None, log.read_text()
        process.terminate()
        async with asyncio.timeout(60):
            assert await process.wait() == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("everywhere", [True, False], ids=["in all namespaces", "in one"])
async def test_the_operators_permissions_are_sufficient_and_all_used(
    helm: Helm, etcd: EtcdServer, tmp_path: Path, everywhere: bool
) -> None:
    where = [] if everywhere else [f"--set=namespaces={{{helm.namespace}}}"]
    where += [f"--set=etcd.secretNamespaces={{{helm.namespace}}}", "--set=etcd.allowedEndpoints={127.0.0.0/8}"]
    await helm("install", RELEASE, str(CHART), *where)
    await helm.kubectl("wait", f"crd/{CRD}", "--for=condition=Established", "--timeout=60s")
    granted = await helm.rights(of=RELEASE, namespace=helm.namespace)
    log = tmp_path / "operator.log"
    async with (
        pod_groups_defined(helm.cluster, SCHEDULER_PLUGINS_GROUPS),
        pod_groups_defined(helm.cluster, VOLCANO_GROUPS),
        running_operator(helm, log),
        await WatchingApi.from_kubeconfig(str(helm.cluster.kubeconfig)) as api,
    ):
        ns = OperatorNamespace(api, helm.cluster, helm.namespace, restricted=True)
        await job_from_apply_to_delete(helm, ns)
        await a_gang(ns, "SchedulerPlugins", SCHEDULER_PLUGINS_GROUPS, etcd)
        await a_gang(ns, "Volcano", VOLCANO_GROUPS, etcd)
        await a_suspended_job(ns, etcd)
        await a_job_with_a_missing_secret_and_a_ttl(ns, etcd)
        await a_job_whose_pod_does_not_start(ns, etcd)
    assert "forbidden" not in log.read_text().lower()
    assert helm.audit.refused(helm.namespace, RELEASE) == set()
    assert helm.audit.used(helm.namespace, RELEASE) == {right[:3] for right in granted}


async def job_from_apply_to_delete(helm: Helm, ns: OperatorNamespace) -> None:
    """Run a job that loses a pod, shrinks, succeeds, and is deleted by the user."""
    await ns.apply("rounds", maxReplicas=2, disruptionBudget=True)
    pods = await ns.wait_for_pods(2, "rounds")
    gone, stays = sorted(pods, key=lambda name: index_of(pods[name]))
    made = await ns.wait_for(DEPLOYMENTS, lambda found: "rounds-etcd" in found)
    assert made["rounds-etcd"]["metadata"]["annotations"][CERTIFICATE]
    await ns.api.patch(DEPLOYMENTS, ns.name, "rounds-etcd", {"metadata": {"annotations": {CERTIFICATE: ""}}})
    await ns.wait_for(DEPLOYMENTS, lambda found: found["rounds-etcd"]["metadata"]["annotations"][CERTIFICATE] != "")
    await helm.kubectl("delete", "pod", gone)
    await ns.wait_for(PODS, lambda found: gone not in found and len(live(found)) == 2, labels=worker_selector("rounds"))

    await ns.wait_for(DISRUPTION_BUDGETS, lambda found: "rounds-workers" in found)
    found = await ns.wait_for(NETWORK_POLICIES, lambda found: "rounds-ingress" in found)
    rules = found["rounds-ingress"]["spec"]["ingress"]
    assert ["from" in rule for rule in rules] == [True, False, False], "the operator of this test runs in no pod"
    await ns.api.patch(NETWORK_POLICIES, ns.name, "rounds-ingress", {"spec": {"ingress": [{}]}})
    await ns.wait_for(NETWORK_POLICIES, lambda found: found["rounds-ingress"]["spec"]["ingress"] == rules)
    await ns.change("rounds", minReplicas=2)
    await ns.wait_for(DISRUPTION_BUDGETS, lambda found: found["rounds-workers"]["spec"]["minAvailable"] == 2)
    await ns.change("rounds", minReplicas=1)
    await helm.kubectl("scale", "elasticjob/rounds", "--replicas=1")
    (left,) = await ns.wait_for_pods(1, "rounds")
    assert left != stays
    await ns.wait_for(PODS, lambda found: stays not in found)
    description = (await helm.kubectl("describe", "elasticjob/rounds")).stdout
    assert "was deleted" in description
    assert "scaled from 2 to 1 pod" in description

    await ns.report_ended(left, 0)
    for kind in (DISRUPTION_BUDGETS, NETWORK_POLICIES, DEPLOYMENTS, SERVICES):
        await ns.wait_for(kind, lambda found: not any(name.startswith("rounds") for name in found))
    await helm.kubectl("delete", "elasticjob/rounds")


async def a_gang(ns: OperatorNamespace, gang: str, groups: Resource, etcd: EtcdServer) -> None:
    """Run a job with a PodGroup, which follows minReplicas and is deleted when the job is suspended."""
    name = gang.lower()
    outside = {"endpoint": etcd.endpoint}
    await ns.apply(name, schedulingPolicy={"gang": gang}, etcd=outside, template={})
    await ns.wait_for(groups, lambda found: name in found)
    await ns.change(name, minReplicas=2)
    await ns.wait_for(groups, lambda found: found[name]["spec"]["minMember"] == 2)
    await ns.change(name, suspend=True)
    await ns.wait_for(groups, lambda found: not found)
    await ns.api.delete(ELASTIC_JOBS, ns.name, name)


async def a_suspended_job(ns: OperatorNamespace, etcd: EtcdServer) -> None:
    """Run a job that is suspended after a round, so that its report is stored and is extended when the job finishes.

    The agent of the job chooses its metrics port itself.
    """
    job = await ns.apply("rests", etcd={"endpoint": etcd.endpoint}, replicas=1, metricsPort=0)
    (pod,) = await ns.wait_for_pods(1, "rests")
    async with etcd.connected() as store:
        past = PastRound(number=1, began=1_700_000_000.0, nodes=1)
        await store.put(run_keys(job).history, encode(HistoryRecord(rounds=(past,))))
        await ns.report_round(store, job, pod, metrics=40123)
    await ns.wait_for_job(lambda status: status.get("round") == 1, "rests")
    annotations_for = ("elastic.pytorch.org/metrics-port", "40123")
    await ns.wait_for(PODS, lambda found: annotations_for in found[pod]["metadata"].get("annotations", {}).items())
    await ns.change("rests", suspend=True)
    await ns.wait_for(CONFIG_MAPS, lambda found: "rests-report" in found)
    await ns.wait_for_job(lambda status: holds(status, "Suspended"), "rests")
    await ns.change("rests", suspend=False)
    (pod,) = await ns.wait_for_pods(1, "rests")
    await ns.report_ended(pod, 0)
    await ns.wait_for_job(lambda status: holds(status, "Succeeded"), "rests")
    reports = await ns.wait_for(CONFIG_MAPS, lambda found: "Succeeded" in str(found["rests-report"]["data"]))
    kept = json.loads(reports["rests-report"]["data"]["report.json"])
    assert [round["number"] for round in kept["rounds"]] == [1]
    await ns.api.delete(ELASTIC_JOBS, ns.name, "rests")


async def a_job_with_a_missing_secret_and_a_ttl(ns: OperatorNamespace, etcd: EtcdServer) -> None:
    """Run a job whose etcd requires credentials from a missing Secret, and which is deleted when it has finished."""
    outside = {"endpoint": f"https://{etcd.endpoint}", "tlsSecret": "not-created"}
    await ns.apply("brief", etcd=outside, ttlSecondsAfterFinished=0, replicas=1)
    (pod,) = await ns.wait_for_pods(1, "brief")
    await ns.report_ended(pod, 0)
    await ns.wait_for(ELASTIC_JOBS, lambda found: "brief" not in found)


async def a_job_whose_pod_does_not_start(ns: OperatorNamespace, etcd: EtcdServer) -> None:
    """Run a job with a pod whose problem is reported only by an event."""
    await ns.apply("stuck", etcd={"endpoint": etcd.endpoint}, template={"spec": {"nodeName": "away"}}, replicas=1)
    ((name, pod),) = (await ns.wait_for_pods(1, "stuck")).items()
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": ns.name},
        "involvedObject": {
            "kind": "Pod",
            "namespace": ns.name,
            "name": name,
            "uid": pod["metadata"]["uid"],
        },
        "type": "Warning",
        "reason": "FailedMount",
        "message": 'MountVolume.SetUp failed for volume "data" : secret "tea" not found',
        "source": {"component": "kubelet"},
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    await ns.api.create(EVENTS, ns.name, event)
    why = f"{event['message']}; create it, or name another one in spec.template"
    message = f"0 of at least 1 pod are ready; {name} is not ready yet: {why}"
    await ns.wait_for_job(lambda status: conditions(status).get("Waiting", {}).get("message") == message, "stuck")
    await ns.api.delete(ELASTIC_JOBS, ns.name, "stuck")


async def test_namespace_viewers_and_editors_have_the_same_access_to_jobs(helm: Helm) -> None:
    await helm("install", RELEASE, str(CHART))
    for role, sign in (("view", "elasticjobs"), ("edit", "elasticjobs/scale"), ("admin", "elasticjobs/scale")):
        # Kubernetes adds the rules to these roles some time after the installation.
        added = f"jsonpath={{.rules[?(@.resources[0]=='{sign}')].verbs}}"
        await helm.kubectl("wait", f"clusterrole/{role}", f"--for={added}", "--timeout=60s")
        account = f"{helm.namespace}:{role}"
        await helm.kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--serviceaccount={account}")
        rights = {right[1:3] for right in await helm.rights(of=role, namespace=helm.namespace)}
        assert ("elasticjobs", "watch" if role == "view" else "deletecollection") in rights
        assert (("elasticjobs", "delete") in rights) == (("elasticjobs/scale", "patch") in rights) == (role != "view")
        assert {("pods/log", "get"), ("events", "list")} <= rights, "for `elasticjob logs` and `elasticjob describe`"
        assert ("configmaps", "get") in rights, "for `elasticjob report`"
        assert (("pods/proxy", "get") in rights) == (role != "view"), "for `elasticjob top`"
        assert ("elasticjobs/status", "update") not in rights


async def test_the_documented_network_policies_are_valid(helm: Helm) -> None:
    text = (ROOT / "docs" / "cluster.md").read_text()
    [policies] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    result = await helm.kubectl("apply", "--dry-run=server", "-f", "-", stdin=policies)
    assert result.stdout.count("created (server dry run)") == 2
    assert {LABEL_ROLE, LABEL_JOB} == set(re.findall(r"[{](?!kubernetes)([\w./]+): ", policies))
