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

from elastic_operator.api.constants import (
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_ROLE,
    ROLE_WORKER,
    pod_name,
    worker_selector,
)
from elastic_operator.kubernetes.client import SCHEDULER_PLUGINS_GROUPS, VOLCANO_GROUPS
from tests.support.audit import AuditLog
from tests.support.cluster_user import job
from tests.support.pod_groups import installed
from tests.support.prometheus import prometheus_command, promtool
from tests.support.testbed.control_plane import ControlPlane
from torchelastic.protocol import (
    HistoryRecord,
    Member,
    NodeRecord,
    PastRound,
    RoundRecord,
    RunKeys,
    SizeRecord,
    StateRecord,
    encode,
)
from torchelastic.store import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.kubernetes.client import Resource
    from tests.support.etcd import EtcdServer
    from tests.support.testbed.commands import Result

pytestmark = [pytest.mark.control_plane, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts"
CRD = "elasticjobs.elastic.pytorch.org"
RELEASE = "elastic-operator"
OPERATOR = Path(sys.executable).with_name("elastic-operator")
Right = tuple[str, str, str, str]
"""An API group, a resource, a verb, and the names of the permitted objects."""


Target = dict[str, str]
"""The discovery labels of one port of a pod, or of a container without ports."""


def of_a_pod(address: str, *ports: tuple[str, str, int], **about: str) -> list[Target]:
    """The discovery labels of a pod.

    Args:
        address: of the pod.
        ports: of the pod: container, name of the port, and number; without name and number of a container without any.
        about: its labels and annotations, in the form of Prometheus.
    """
    pod = {"pod_name": "a-pod", "namespace": "team", "pod_ip": address, **about}
    found = []
    for container, name, number in ports:
        port = {"pod_container_port_name": name, "pod_container_port_number": str(number)} if number else {}
        told = {**pod, "pod_container_name": container, **port}
        bracketed = f"[{address}]" if ":" in address else address
        where = f"{bracketed}:{number}" if number else address
        found.append({"__address__": where, **{f"__meta_kubernetes_{key}": value for key, value in told.items()}})
    return found


WORKER = {"pod_label_elastic_pytorch_org_role": "worker", "pod_label_app_kubernetes_io_name": "elasticjob"}


def noted(port: int) -> dict[str, str]:
    """The annotations of a worker pod."""
    notes = {"prometheus_io_scrape": "true", "prometheus_io_port": str(port)}
    own = {"elastic_pytorch_org_metrics_port": str(port)}
    return {f"pod_annotation_{key}": value for key, value in (notes | own).items()}


A_WORKER = of_a_pod(
    "10.0.0.1", ("worker", "http", 80), ("worker", "metrics", 9464), ("proxy", "", 0), **WORKER, **noted(9464)
)
ON_ITS_HOST = of_a_pod("fd00::1", ("worker", "", 0), ("proxy", "http", 80), **WORKER, **noted(40123))
NOT_YET = of_a_pod("10.0.0.2", ("worker", "", 0), **WORKER)
THE_OPERATOR = of_a_pod(
    "10.0.0.9",
    ("operator", "metrics", 8080),
    pod_label_app_kubernetes_io_name="elastic-operator",
    pod_annotation_prometheus_io_scrape="true",
    pod_annotation_prometheus_io_port="8080",
)
SOMEBODY_ELSE = of_a_pod(
    "10.0.0.8", ("web", "http", 80), pod_annotation_prometheus_io_scrape="true", pod_annotation_prometheus_io_port="80"
)


def scraped(folder: Path, rules: list[Any], *pods: list[Target]) -> list[str]:
    """The targets that Prometheus scrapes among these pods with these relabelling rules."""
    told = folder / "told.json"
    told.write_text(json.dumps([{"targets": [each["__address__"]], "labels": each} for pod in pods for each in pod]))
    scrape = {"job_name": "elastic", "file_sd_configs": [{"files": [str(told)]}], "relabel_configs": rules}
    prometheus_command(folder, 0, [scrape])
    checked = promtool("check", "service-discovery", "--timeout=3s", folder / "prometheus.yml", "elastic")
    # Targets with the same labels are one.
    kept = {frozenset(each["labels"].items()) for each in json.loads(checked.stdout) if each.get("labels")}
    return sorted(dict(labels)["__address__"] for labels in kept)


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
        """An object, or a list of them."""
        found: dict[str, Any] = json.loads((await self.kubectl("get", *what, "-o", "json")).stdout)
        return found

    async def rights(self, *, of: str, namespace: str) -> set[Right]:
        """The permissions of a service account in a namespace, beyond those of every user."""
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        }
        who = f"system:serviceaccount:{self.namespace}:{of}"
        # Client-side validation would need a permission that it lacks; the server validates too.
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
    """The requests of service accounts to the API server."""
    return AuditLog(tmp_path_factory.mktemp("audit"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, audit: AuditLog) -> AsyncIterator[ControlPlane]:
    """A control plane for these tests alone: they install and remove cluster-wide objects."""
    flags = {"kube-apiserver": audit.flags}
    async with ControlPlane(tmp_path_factory.mktemp("control-plane"), flags=flags) as control_plane:
        yield control_plane


@pytest_asyncio.fixture(loop_scope="module")
async def helm(cluster: ControlPlane, audit: AuditLog) -> AsyncIterator[Helm]:
    """Helm in its own namespace; afterwards its releases are uninstalled."""
    async with cluster.namespace(**{"pod-security.kubernetes.io/enforce": "restricted"}) as namespace:
        helm = Helm(cluster, namespace, audit)
        yield helm
        for release in (await helm("list", "--short")).stdout.split():
            await helm("uninstall", release)
        await cluster.kubectl("delete", "crd", CRD, "--ignore-not-found")


@pytest.fixture
def own_chart(tmp_path: Path) -> Path:
    """A copy of the chart that may be changed, with the CRD in the place of the link."""
    return Path(shutil.copytree(CHART, tmp_path / "chart"))


async def rendered(helm: Helm, *words: str, chart: Path = CHART) -> list[dict[str, Any]]:
    """All objects of the chart."""
    text = (await helm("template", RELEASE, str(chart), "--kube-version=1.30.0", *words)).stdout
    return [found for found in yaml.safe_load_all(text) if found]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Those of a kind."""
    return [found for found in objects if found["kind"] == kind]


async def test_helm_lint_accepts_the_chart(helm: Helm) -> None:
    told = await helm("lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in told.stdout
    assert "WARNING" not in told.stdout


async def test_a_cluster_version_below_the_minimum_is_refused(helm: Helm) -> None:
    told = await helm("template", str(CHART), "--kube-version=1.29.9", check=False)
    assert told.returncode != 0
    assert "requires kubeVersion: >=1.30.0-0" in told.stderr
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
    (own_chart / "crd" / "elasticjob.yaml").write_text("../../crds/elasticjob.yaml")  # as on a system without links
    told = await helm("template", str(own_chart), "--kube-version=1.30.0", check=False)
    assert told.returncode != 0
    assert "it is a symbolic link, which was lost on the way here. Use a packaged chart" in told.stderr
    assert await rendered(helm, "--set=crds.install=false", chart=own_chart)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("replica=2", "additional properties 'replica' not allowed"),
        ("replicas=two", "/replicas.*got string, want integer"),
        ("logging.level=verbose", "/logging/level.*'debug', 'info', 'warning', 'error'"),
        ("podLabels.a=1", "/podLabels/a.*got number, want string"),
        ("replicas=2,leaderElection=false", "all copies would act at once: set leaderElection=true or replicas=1"),
        ("serviceAccount.create=false", "serviceAccount.name must say which one the operator runs as"),
    ],
)
async def test_invalid_values_are_refused_in_one_sentence(helm: Helm, setting: str, words: str) -> None:
    told = await helm("install", RELEASE, str(CHART), f"--set={setting}", check=False)
    assert told.returncode != 0
    assert re.search(words, told.stderr)
    assert (await helm("list", "--short")).stdout == ""


def paths(values: dict[str, Any], *parents: str) -> list[tuple[str, ...]]:
    """The paths of all values of the chart, and of the mappings that hold them."""
    found = []
    for name, value in values.items():
        place = (*parents, name)
        found.append(place)
        if isinstance(value, dict) and name != "resources":
            found += paths(value, *place)
    return found


async def test_a_default_removed_by_null_is_reported(helm: Helm, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    words = ("template", str(CHART), "--kube-version=1.30.0", f"--values={file}")
    required = {*paths(yaml.safe_load((CHART / "values.yaml").read_text()))} - {("runAsUser",)}
    assert {("replicas",), ("crds", "keep"), ("monitoring", "rules", "labels")} < required
    for path in required:
        file.write_text("".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(path)))
        told = await helm(*words, check=False)
        assert told.returncode != 0, path
        above = "".join(f"/{name}" for name in path[:-1])
        assert f"- at '{above}': missing property '{path[-1]}'" in told.stderr


@pytest.mark.parametrize(
    ("setting", "apart"),
    [
        ("replicas=1", False),
        ("replicas=2", True),
        ("replicas=2,affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution=[]", False),
    ],
)
async def test_operator_replicas_prefer_different_nodes(helm: Helm, setting: str, apart: bool) -> None:
    [deployment] = of_kind(await rendered(helm, f"--set-json={setting}"), "Deployment")
    affinity = deployment["spec"]["template"]["spec"].get("affinity", {})
    assert ("podAntiAffinity" in affinity) == apart
    if apart:
        [rule] = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert rule["podAffinityTerm"] == {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": deployment["spec"]["selector"]["matchLabels"]},
        }
        # The API server knows every field.
        await helm.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(deployment))


async def test_every_chart_value_takes_effect(helm: Helm) -> None:
    words = (
        "image.repository=registry.example.org/operator,image.tag=1.2,image.pullPolicy=Always,imagePullSecrets[0].name=key,"
        "replicas=2,etcd.image=etcd:1,agent.metricsPort=9999,logging.level=debug,logging.format=json,"
        "serviceAccount.name=me,serviceAccount.annotations.a=b,runAsUser=1000650000,podLabels.c=d,podAnnotations.e=f,"
        "nodeSelector.g=h,tolerations[0].operator=Exists,priorityClassName=high,resources.limits.cpu=2,"
        "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions=null"
    )
    objects = await rendered(helm, f"--set={words}")
    [account] = of_kind(objects, "ServiceAccount")
    assert account["metadata"]["name"] == "me"
    assert account["metadata"]["annotations"] == {"a": "b"}
    for binding in (*of_kind(objects, "ClusterRoleBinding"), *of_kind(objects, "RoleBinding")):
        [subject] = binding["subjects"]
        assert subject == {"kind": "ServiceAccount", "name": "me", "namespace": helm.namespace}
    [deployment] = of_kind(objects, "Deployment")
    assert deployment["spec"]["replicas"] == 2
    template = deployment["spec"]["template"]
    assert template["metadata"]["labels"].items() >= {
        ("c", "d"),
        *deployment["spec"]["selector"]["matchLabels"].items(),
    }
    assert template["metadata"]["annotations"].items() > {("e", "f")}
    pod = template["spec"]
    [container] = pod["containers"]
    assert container["image"] == "registry.example.org/operator:1.2"
    assert container["imagePullPolicy"] == "Always"
    assert {"--etcd-image=etcd:1", "--agent-metrics-port=9999", "--log-level=debug", "--log-format=json"} <= {
        *container["args"]
    }
    assert container["resources"]["limits"] == {"memory": "512Mi", "cpu": 2}
    assert pod["serviceAccountName"] == "me"
    assert pod["imagePullSecrets"] == [{"name": "key"}]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == 1000650000
    assert pod["nodeSelector"] == {"g": "h"}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["priorityClassName"] == "high"
    assert "nodeAffinity" in pod["affinity"]

    [deployment] = of_kind(await rendered(helm, "--set=runAsUser=null"), "Deployment")
    assert not deployment["spec"]["template"]["spec"]["securityContext"].keys() & {"runAsUser", "runAsGroup"}


async def test_a_prometheus_with_annotation_discovery_finds_the_operator(helm: Helm) -> None:
    async def told(*words: str) -> dict[str, str]:
        [deployment] = of_kind(await rendered(helm, *words), "Deployment")
        annotations: dict[str, str] = deployment["spec"]["template"]["metadata"].get("annotations", {})
        return annotations

    where = {"prometheus.io/scrape": "true", "prometheus.io/port": "8080", "prometheus.io/path": "/metrics"}
    assert await told() == where
    assert await told("--set-string=podAnnotations.prometheus\\.io/scrape=false") == where | {
        "prometheus.io/scrape": "false"
    }
    assert await told("--set=monitoring.annotations=false") == {}


async def test_the_chart_requires_neither_prometheus_nor_grafana(helm: Helm) -> None:
    kinds = {found["kind"] for found in await rendered(helm)}
    assert not kinds & {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ConfigMap", "Service"}


@pytest.mark.parametrize("namespaces", [[], ["one", "two"]], ids=["in all namespaces", "in some"])
async def test_prometheus_operator_scrapes_the_agents_and_the_operator(helm: Helm, namespaces: list[str]) -> None:
    words = "monitoring.monitors.enabled=true,monitoring.monitors.interval=15s,monitoring.monitors.labels.release=mine"
    where = [f"--set=namespaces={{{','.join(namespaces)}}}"] if namespaces else []
    objects = await rendered(helm, f"--set={words}", *where)
    [agents], [operator] = of_kind(objects, "PodMonitor"), of_kind(objects, "ServiceMonitor")
    for monitor in (agents, operator):
        assert monitor["metadata"]["labels"]["release"] == "mine"
    [endpoint] = agents["spec"].pop("podMetricsEndpoints")
    assert agents["spec"] == {
        "namespaceSelector": {"matchNames": namespaces} if namespaces else {"any": True},
        "selector": {"matchLabels": {LABEL_ROLE: ROLE_WORKER}},
    }
    assert (endpoint.keys(), endpoint["interval"]) == ({"relabelings", "interval"}, "15s")
    # From the monitor to the service, from there to the pods, and there to a port.
    [service], [deployment] = of_kind(objects, "Service"), of_kind(objects, "Deployment")
    assert operator["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert operator["spec"]["endpoints"] == [{"port": "metrics", "interval": "15s"}]
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [port] = service["spec"]["ports"]
    [named] = pod["spec"]["containers"][0]["ports"]
    assert (port["name"], port["targetPort"], port["port"]) == ("metrics", named["name"], named["containerPort"])


@pytest.mark.prometheus
async def test_prometheus_operator_finds_each_agent_once_at_its_annotated_port(helm: Helm, tmp_path: Path) -> None:
    [agents] = of_kind(await rendered(helm, "--set=monitoring.monitors.enabled=true"), "PodMonitor")
    [endpoint] = agents["spec"]["podMetricsEndpoints"]
    own_words = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    rules = [{own_words.get(key, key): value for key, value in rule.items()} for rule in endpoint["relabelings"]]
    assert scraped(tmp_path, rules, A_WORKER, ON_ITS_HOST, NOT_YET) == ["10.0.0.1:9464", "[fd00::1]:40123"]


@pytest.mark.prometheus
async def test_a_prometheus_configured_as_documented_finds_each_agent_and_the_operator_once(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    [documented] = re.findall(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL)
    [job] = yaml.safe_load(documented)["scrape_configs"]
    rules = job["relabel_configs"]
    found = scraped(tmp_path, rules, A_WORKER, ON_ITS_HOST, NOT_YET, THE_OPERATOR, SOMEBODY_ELSE)
    assert found == ["10.0.0.1:9464", "10.0.0.9:8080", "[fd00::1]:40123"]


async def test_service_names_stay_within_the_limit(helm: Helm) -> None:
    release = "team-a" * 8 + "-long"
    words = ("template", release, str(CHART), "--kube-version=1.30.0", "--set=monitoring.monitors.enabled=true")
    objects = [found for found in yaml.safe_load_all((await helm(*words)).stdout) if found]
    [service] = of_kind(objects, "Service")
    assert len(service["metadata"]["name"]) <= 63
    assert service["metadata"]["name"].endswith("-metrics")


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
    [found, _] = of_kind(
        await rendered(
            helm, words, "--set=monitoring.dashboards.label=show", "--set-string=monitoring.dashboards.labelValue=on"
        ),
        "ConfigMap",
    )
    assert found["metadata"]["labels"]["show"] == "on"


async def test_a_release_image_is_tagged_with_the_version_and_a_clones_image_with_dev(
    helm: Helm, own_chart: Path
) -> None:
    about = own_chart / "Chart.yaml"
    for version, tag in (("0.1.0.dev0", "dev"), ("0.1.0rc1", "0.1.0rc1"), ("0.1.0", "0.1.0")):
        about.write_text(re.sub(r"appVersion: .*", f"appVersion: {version}", about.read_text()))
        [deployment] = of_kind(await rendered(helm, chart=own_chart), "Deployment")
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"elastic-operator:{tag}"


async def test_names_that_look_like_other_yaml_types_stay_names(helm: Helm) -> None:
    words = ("--kube-version=1.30.0", "--namespace=1234", "--set-string=namespaces={5678,on}")
    text = (await helm("template", "y", str(CHART), *words, "--set-string=serviceAccount.name=90")).stdout
    objects = [found for found in yaml.safe_load_all(text) if found]
    assert {found["metadata"].get("namespace") for found in objects} == {None, "1234", "5678", "on"}
    assert {found["metadata"]["labels"]["app.kubernetes.io/instance"] for found in objects} == {"y"}
    [deployment] = of_kind(objects, "Deployment")
    assert deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "y"
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "90"
    for binding in of_kind(objects, "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "90", "namespace": "1234"}]


async def test_install_upgrade_uninstall_and_reinstall_work(helm: Helm) -> None:
    told = (await helm("install", RELEASE, str(CHART))).stdout
    assert "kubectl apply -f examples/digits.yaml" in told
    assert "kind load docker-image elastic-operator:dev elastic-agent:dev" in told
    # Its pod is created in a namespace that admits only restricted pods.
    await helm.kubectl("wait", f"deployment/{RELEASE}", "--for=jsonpath={.status.replicas}=1", "--timeout=60s")
    await helm.kubectl("wait", f"crd/{CRD}", "--for=condition=Established", "--timeout=60s")
    await helm.kubectl("apply", "-f", str(ROOT / "examples" / "digits.yaml"))

    await helm("upgrade", RELEASE, str(CHART), "--set=podLabels.upgraded=yes")
    template = (await helm.get(f"deployment/{RELEASE}"))["spec"]["template"]
    assert template["metadata"]["labels"]["upgraded"] == "yes"
    # Switch to an operator without a Lease, and back.
    for election, strategy in (("false", "Recreate"), ("true", "RollingUpdate")):
        await helm("upgrade", RELEASE, str(CHART), f"--set=leaderElection={election}")
        assert (await helm.get(f"deployment/{RELEASE}"))["spec"]["strategy"]["type"] == strategy

    told = (await helm("uninstall", RELEASE)).stdout
    assert f"[CustomResourceDefinition] {CRD}" in told
    assert (await helm.get("elasticjob/digits"))["spec"]["replicas"] == 2
    left = await helm.kubectl(
        "get", "deployments,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings", "-o", "name",
        "-l", f"app.kubernetes.io/name={RELEASE}",
    )  # fmt: skip
    assert left.stdout == ""

    # Only a release of the same name adopts the CRD that stayed.
    refused = await helm("install", "other", str(CHART), check=False)
    assert refused.returncode != 0
    assert f'CustomResourceDefinition "{CRD}" in namespace "" exists and cannot be imported' in refused.stderr
    await helm("install", RELEASE, str(CHART))
    await helm("uninstall", RELEASE)
    await helm("install", "other", str(CHART), "--take-ownership")
    assert (await helm.get("elasticjob/digits"))["spec"]["replicas"] == 2


async def test_an_upgrade_brings_the_new_crd(helm: Helm, own_chart: Path) -> None:
    await helm("install", RELEASE, str(CHART))
    file = own_chart / "crd" / "elasticjob.yaml"
    file.write_text(file.read_text().replace("shortNames: [ej]", "shortNames: [ej, elastic]"))
    await helm("upgrade", RELEASE, str(own_chart))
    assert (await helm.get("crd", CRD))["spec"]["names"]["shortNames"] == ["ej", "elastic"]

    # It stays although it is no longer part of the release.
    await helm("upgrade", RELEASE, str(own_chart), "--set=crds.install=false")
    assert (await helm.get("crd", CRD))["spec"]["names"]["shortNames"] == ["ej", "elastic"]


async def test_the_crd_and_all_jobs_are_removed_with_the_release_if_requested(helm: Helm) -> None:
    await helm("install", RELEASE, str(CHART))
    await helm.kubectl("wait", f"crd/{CRD}", "--for=condition=Established", "--timeout=60s")
    await helm.kubectl("apply", "-f", str(ROOT / "examples" / "digits.yaml"))
    await helm("upgrade", RELEASE, str(CHART), "--set=crds.keep=false")
    await helm("uninstall", RELEASE, "--wait")
    assert (await helm.kubectl("get", "crd", "-o", "name")).stdout == ""


async def test_a_crd_applied_by_others_is_left_to_them(helm: Helm) -> None:
    await helm.kubectl("apply", "-f", str(ROOT / "crds"))
    await helm("install", RELEASE, str(CHART), "--set=crds.install=false")
    await helm("uninstall", RELEASE)
    assert (
        "annotations" not in (await helm.get("crd", CRD))["metadata"]
        or "meta.helm.sh/release-name" not in ((await helm.get("crd", CRD))["metadata"]["annotations"])
    )


def jobs_rights() -> set[Right]:
    """The permissions that the operator needs in namespaces with jobs."""
    group = "elastic.pytorch.org"
    owned = [("", "pods"), ("", "services"), ("apps", "deployments")]
    noted = ("", "pods", "patch", "")
    return {
        *((group, "elasticjobs", verb, "") for verb in ("list", "watch", "delete")),
        (group, "elasticjobs/status", "update", ""),
        (group, "elasticjobs/scale", "patch", ""),
        *((*what, verb, "") for what in owned for verb in ("list", "watch", "create", "delete")),
        noted,
        *(("policy", "poddisruptionbudgets", verb, "") for verb in ("list", "watch", "create", "patch", "delete")),
        *(
            (scheduling, "podgroups", verb, "")
            for scheduling in ("scheduling.x-k8s.io", "scheduling.volcano.sh")
            for verb in ("list", "create", "patch", "delete")
        ),
        *(("", "configmaps", verb, "") for verb in ("get", "create", "patch")),
        *(("", "events", verb, "") for verb in ("list", "create")),
    }


def lease_rights() -> set[Right]:
    """The permissions that leader election needs in its own namespace."""
    group = "coordination.k8s.io"
    return {(group, "leases", "create", ""), *((group, "leases", verb, RELEASE) for verb in ("get", "update"))}


async def test_the_operator_has_its_permissions_in_all_namespaces(helm: Helm) -> None:
    await helm("install", RELEASE, str(CHART))
    assert await helm.rights(of=RELEASE, namespace="default") == jobs_rights()
    assert await helm.rights(of=RELEASE, namespace=helm.namespace) == jobs_rights() | lease_rights()


async def test_the_operator_has_its_permissions_in_the_listed_namespaces_only(helm: Helm) -> None:
    async with helm.cluster.namespace() as one, helm.cluster.namespace() as other:
        await helm("install", RELEASE, str(CHART), f"--set=namespaces={{{one},{other}}}")
        assert await helm.rights(of=RELEASE, namespace=one) == jobs_rights()
        assert await helm.rights(of=RELEASE, namespace=other) == jobs_rights()
        assert await helm.rights(of=RELEASE, namespace="default") == set()
        assert await helm.rights(of=RELEASE, namespace=helm.namespace) == lease_rights()
        told = (await helm("get", "notes", RELEASE)).stdout
        assert f"manages the namespaces {one}, {other}." in told
        assert f"kubectl -n {one} apply -f examples/digits.yaml" in told


async def test_secrets_are_readable_only_in_the_listed_namespaces(helm: Helm) -> None:
    async with helm.cluster.namespace() as one:
        await helm("install", RELEASE, str(CHART), f"--set=etcd.secretNamespaces={{{one}}}")
        assert await helm.rights(of=RELEASE, namespace=one) == jobs_rights() | {("", "secrets", "get", "")}
        assert await helm.rights(of=RELEASE, namespace="default") == jobs_rights()
        [container] = (await helm.get(f"deployment/{RELEASE}"))["spec"]["template"]["spec"]["containers"]
        assert f"--etcd-secrets-namespace={one}" in container["args"]


@contextlib.asynccontextmanager
async def running_operator(helm: Helm, log: Path) -> AsyncIterator[None]:
    """The operator as the release's Deployment would run it, with the permissions of its service account."""
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
    await helm("install", RELEASE, str(CHART), f"--set=etcd.secretNamespaces={{{helm.namespace}}}", *where)
    await helm.kubectl("wait", f"crd/{CRD}", "--for=condition=Established", "--timeout=60s")
    granted = await helm.rights(of=RELEASE, namespace=helm.namespace)
    log = tmp_path / "operator.log"
    async with (
        installed(helm.cluster, SCHEDULER_PLUGINS_GROUPS),
        installed(helm.cluster, VOLCANO_GROUPS),
        running_operator(helm, log),
    ):
        await from_apply_to_delete(helm)
        await a_gang(helm, "SchedulerPlugins", SCHEDULER_PLUGINS_GROUPS, etcd)
        await a_gang(helm, "Volcano", VOLCANO_GROUPS, etcd)
        await a_job_that_rests(helm, etcd)
        await a_job_that_needs_a_secret_and_goes_by_itself(helm, etcd)
        await a_job_whose_pod_does_not_start(helm, etcd)
    assert "forbidden" not in log.read_text().lower()
    assert helm.audit.refused(helm.namespace, RELEASE) == set()
    assert helm.audit.used(helm.namespace, RELEASE) == {right[:3] for right in granted}


async def from_apply_to_delete(helm: Helm) -> None:
    """A job that loses a pod, shrinks, succeeds, and is deleted by hand."""
    await helm.kubectl("apply", "-f", "-", stdin=json.dumps(job("rounds", maxReplicas=2, disruptionBudget=True)))

    async def until(condition: str) -> None:
        await helm.kubectl("wait", "elasticjob/rounds", f"--for=jsonpath={condition}", "--timeout=60s")

    await until("{.spec.replicas}=2")
    await until("{.status.replicas}=2")
    await helm.kubectl("wait", "deployment/rounds-etcd", "--for=create", "--timeout=60s")
    gone, stays = (await helm.get("pods", "-l", f"{LABEL_JOB}=rounds,{LABEL_ROLE}={ROLE_WORKER}"))["items"]
    if gone["metadata"]["labels"][LABEL_INDEX] == "1":
        gone, stays = stays, gone
    await helm.kubectl("delete", "pod", gone["metadata"]["name"])
    uid = (await helm.get("elasticjob/rounds"))["metadata"]["uid"]
    another = pod_name("rounds", uid, 0, gone["metadata"]["uid"])
    await helm.kubectl("wait", f"pod/{another}", "--for=create", "--timeout=60s")

    await helm.kubectl("wait", "pdb/rounds-workers", "--for=create", "--timeout=60s")
    await change(helm, "rounds", minReplicas=2)
    await helm.kubectl("wait", "pdb/rounds-workers", "--for=jsonpath={.spec.minAvailable}=2", "--timeout=60s")
    await change(helm, "rounds", minReplicas=1)
    await helm.kubectl("scale", "elasticjob/rounds", "--replicas=1")
    await until("{.status.replicas}=1")
    await helm.kubectl("wait", f"pod/{stays['metadata']['name']}", "--for=delete", "--timeout=60s")
    told = (await helm.kubectl("describe", "elasticjob/rounds")).stdout
    assert "was deleted" in told
    assert "scaled from 2 to 1 pod" in told

    await succeeds(helm, another)
    for each in ("pdb/rounds-workers", "deployment/rounds-etcd", "service/rounds-etcd"):
        await helm.kubectl("wait", each, "--for=delete", "--timeout=60s")
    await helm.kubectl("delete", "elasticjob/rounds")


async def a_gang(helm: Helm, gang: str, groups: Resource, etcd: EtcdServer) -> None:
    """A job with a PodGroup, which follows its minimum and goes when it is suspended."""
    name = gang.lower()
    outside = {"endpoint": etcd.endpoint}
    await helm.kubectl(
        "apply", "-f", "-", stdin=json.dumps(job(name, schedulingPolicy={"gang": gang}, etcd=outside, maxReplicas=3))
    )
    group = f"{groups.plural}.{groups.group}/{name}"
    await helm.kubectl("wait", group, "--for=create", "--timeout=60s")
    await change(helm, name, minReplicas=2)
    await helm.kubectl("wait", group, "--for=jsonpath={.spec.minMember}=2", "--timeout=60s")
    await change(helm, name, suspend=True)
    await helm.kubectl("wait", group, "--for=delete", "--timeout=60s")
    await helm.kubectl("delete", f"elasticjob/{name}")


async def a_job_that_rests(helm: Helm, etcd: EtcdServer) -> None:
    """A job that is suspended after a round, so that its report is stored, and extended at its end.

    Its agent has found a port for its metrics itself.
    """
    outside = {"endpoint": etcd.endpoint}
    resting = job("rests", etcd=outside, replicas=1, metricsPort=0)
    await helm.kubectl("apply", "-f", "-", stdin=json.dumps(resting))
    uid = (await helm.get("elasticjob/rests"))["metadata"]["uid"]
    pod = pod_name("rests", uid, 0, "")
    await helm.kubectl("wait", f"pod/{pod}", "--for=create", "--timeout=60s")
    keys = RunKeys.of(uid)
    store = await connect(etcd.settings)
    try:
        past = PastRound(number=1, began=1_700_000_000.0, nodes=1)
        await store.put(keys.history, encode(HistoryRecord(rounds=(past,))))
        await store.put(
            keys.state, encode(StateRecord(RoundRecord(number=1, members=(Member(f"{pod}.1", "10.0.0.1", 1),))))
        )
        node = NodeRecord(name=pod, address="10.0.0.1", workers=1, size=SizeRecord(min=1, max=2), metrics=40123)
        await store.put(keys.node(f"{pod}.1"), encode(node))
    finally:
        await store.close()
    await helm.kubectl("wait", "elasticjob/rests", "--for=jsonpath={.status.round}=1", "--timeout=60s")
    await runs(helm, pod)
    noted = r"jsonpath={.metadata.annotations.elastic\.pytorch\.org/metrics-port}=40123"
    await helm.kubectl("wait", f"pod/{pod}", f"--for={noted}", "--timeout=60s")
    await change(helm, "rests", suspend=True)
    await helm.kubectl("wait", "configmap/rests-report", "--for=create", "--timeout=60s")
    await helm.kubectl("wait", "elasticjob/rests", "--for=condition=Suspended", "--timeout=60s")
    await change(helm, "rests", suspend=False)
    await helm.kubectl("wait", "pod", f"--selector={worker_selector('rests')}", "--for=create", "--timeout=60s")
    (pod,) = (await helm.kubectl("get", "pod", f"--selector={worker_selector('rests')}", "-o", "name")).stdout.split()
    await succeeds(helm, pod.removeprefix("pod/"))
    await helm.kubectl("wait", "elasticjob/rests", "--for=condition=Succeeded", "--timeout=60s")
    kept = json.loads((await helm.get("configmap/rests-report"))["data"]["report.json"])
    assert (kept["job"]["state"], [round["number"] for round in kept["rounds"]]) == ("Succeeded", [1])
    await helm.kubectl("delete", "elasticjob/rests")


async def a_job_that_needs_a_secret_and_goes_by_itself(helm: Helm, etcd: EtcdServer) -> None:
    """A job whose etcd requires credentials from a missing Secret, and that fails."""
    outside = {"endpoint": f"https://{etcd.endpoint}", "tlsSecret": "nobody-has-made-it"}
    short = {"ttlSecondsAfterFinished": 0, "replicas": 1}
    await helm.kubectl("apply", "-f", "-", stdin=json.dumps(job("brief", etcd=outside, **short)))
    pod = pod_name("brief", (await helm.get("elasticjob/brief"))["metadata"]["uid"], 0, "")
    await helm.kubectl("wait", f"pod/{pod}", "--for=create", "--timeout=50s")
    await succeeds(helm, pod)
    await helm.kubectl("wait", "elasticjob/brief", "--for=delete", "--timeout=50s")


async def a_job_whose_pod_does_not_start(helm: Helm, etcd: EtcdServer) -> None:
    """A job with a pod whose problem is reported by an event alone."""
    bound = {"spec": {"nodeName": "away", "securityContext": {"runAsNonRoot": True}}}
    stuck = job("stuck", etcd={"endpoint": etcd.endpoint}, template=bound, replicas=1)
    await helm.kubectl("apply", "-f", "-", stdin=json.dumps(stuck))
    pod = pod_name("stuck", (await helm.get("elasticjob/stuck"))["metadata"]["uid"], 0, "")
    await helm.kubectl("wait", f"pod/{pod}", "--for=create", "--timeout=60s")
    uid = (await helm.get(f"pod/{pod}"))["metadata"]["uid"]
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": pod, "namespace": helm.namespace},
        "involvedObject": {"kind": "Pod", "namespace": helm.namespace, "name": pod, "uid": uid},
        "type": "Warning",
        "reason": "FailedMount",
        "message": 'MountVolume.SetUp failed for volume "data" : secret "tea" not found',
        "source": {"component": "kubelet"},
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    await helm.kubectl("create", "-f", "-", stdin=json.dumps(event))
    why = f"{event['message']}; create it, or name another one in spec.template"
    told = f"0 of at least 1 pod are ready; {pod} is not ready yet: {why}"
    waits = f'jsonpath={{.status.conditions[?(@.type=="Waiting")].message}}={told}'
    await helm.kubectl("wait", "elasticjob/stuck", f"--for={waits}", "--timeout=60s")
    await helm.kubectl("delete", "elasticjob/stuck")


async def runs(helm: Helm, pod: str) -> None:
    """The kubelet says that a pod's worker runs."""
    await kubelet_says(helm, pod, "Running", running={"startedAt": "2026-01-01T00:00:00Z"})


async def succeeds(helm: Helm, pod: str) -> None:
    """The kubelet says that a pod's worker has ended well."""
    over = {"exitCode": 0, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T01:00:00Z"}
    await kubelet_says(helm, pod, "Succeeded", terminated=over)


async def kubelet_says(helm: Helm, pod: str, phase: str, **state: Any) -> None:
    """The kubelet says this of a pod, and its worker."""
    worker = {"name": "worker", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}
    said = json.dumps({"status": {"phase": phase, "containerStatuses": [worker]}})
    await helm.kubectl("patch", "pod", pod, "--subresource=status", "--type=merge", f"--patch={said}")


async def change(helm: Helm, name: str, **spec: Any) -> None:
    """Change fields of a job's spec."""
    await helm.kubectl("patch", f"elasticjob/{name}", "--type=merge", f"--patch={json.dumps({'spec': spec})}")


async def test_the_operator_has_no_permissions_without_its_roles(helm: Helm) -> None:
    await helm("install", RELEASE, str(CHART), "--set=rbac.create=false,leaderElection=false")
    assert await helm.rights(of=RELEASE, namespace=helm.namespace) == set()


async def test_namespace_viewers_and_editors_have_the_same_access_to_jobs(helm: Helm) -> None:
    await helm("install", RELEASE, str(CHART))
    for role, sign in (("view", "elasticjobs"), ("edit", "elasticjobs/scale"), ("admin", "elasticjobs/scale")):
        # The cluster adds them later.
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
    told = await helm.kubectl("apply", "--dry-run=server", "-f", "-", stdin=policies)
    assert told.stdout.count("created (server dry run)") == 2
    assert {LABEL_ROLE, "app.kubernetes.io/name"} == set(re.findall(r"[{](?!kubernetes)([\w./]+): ", policies))
