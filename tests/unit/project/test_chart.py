"""The files of the Helm chart: CRD, values, RBAC rules and arguments.

tests/kubernetes/test_chart.py installs the chart with helm on a real API server.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from packaging.version import Version

from elastic_operator.kubernetes.main import LOG_FORMATS, LOG_LEVELS, parse
from elastic_operator.kubernetes.settings import OperatorSettings
from elastic_operator.resources.owned_objects import PodSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
ABOUT: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())


def template(name: str) -> str:
    """Return the text of a template."""
    return (CHART / "templates" / name).read_text()


def objects(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path and schema of every value."""
    for name, below in schema.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        yield place, below
        yield from objects(below, place)


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the path of every value; an empty mapping counts as a value."""
    for name, value in values.items():
        place = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value and place != "resources":
            yield from leaves(value, place)
        else:
            yield place


REMOVED = object()


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the default values with one change."""
    values = copy.deepcopy(VALUES)
    *parents, name = path.split(".")
    place = values
    for parent in parents:
        place = place[parent]
    if value is REMOVED:
        del place[name]
    else:
        place[name] = value
    return values


def refusal(path: str, value: object) -> str:
    """Return the schema's error for the default values with one change."""
    values = changed(path, value)
    with pytest.raises(jsonschema.ValidationError) as refused:
        jsonschema.validate(values, SCHEMA)
    message: str = refused.value.message
    return message


def test_the_crd_of_the_chart_is_a_link_to_the_only_definition() -> None:
    link = CHART / "crd" / "elasticjob.yaml"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "crds" / "elasticjob.yaml"
    assert not (CHART / "crds").exists(), "helm installs files in this folder but never upgrades them"
    assert '.Files.Get "crd/elasticjob.yaml"' in template("crd.yaml")


def test_the_chart_has_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = Version(project["version"])
    semantic = version.base_version
    if version.pre:
        semantic += f"-{'.'.join(map(str, version.pre))}"
    if version.dev is not None:
        semantic += f"{'.' if version.pre else '-'}dev.{version.dev}"
    assert ABOUT["name"] == project["name"]
    assert ABOUT["version"] == semantic
    assert ABOUT["appVersion"] == project["version"]


def test_the_schema_is_strict_and_describes_every_value() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    for path, value in {
        "replicas": 0,
        "image.tag": "1@sha256:00",
        "namespaces": ["a", "b-2"],
        "runAsUser": None,
    }.items():
        jsonschema.validate(changed(path, value), SCHEMA)
    for path, schema in objects(SCHEMA):
        assert re.fullmatch(r"[A-Z].{10,}\.", schema["description"]), path
        assert schema.get("additionalProperties", True) is False or "properties" not in schema, path


def test_the_schema_describes_exactly_the_default_values() -> None:
    described = {path for path, schema in objects(SCHEMA) if "properties" not in schema}
    assert described - {"global"} == set(leaves(VALUES))


@pytest.mark.parametrize("path", sorted(path for path, _ in objects(SCHEMA) if path not in ("global", "runAsUser")))
def test_a_default_cannot_be_removed(path: str) -> None:
    """Helm removes a value that is set to null or left empty before it validates the values."""
    assert refusal(path, REMOVED) == f"{path.rpartition('.')[2]!r} is a required property"


def arguments(values: Mapping[str, str]) -> list[str]:
    """Return the operator's arguments in the deployment, with these values filled in."""
    found = re.findall(r"^ +- (?:{{ printf \")?(--.+?)(?:\" \.Values.*)?$", template("deployment.yaml"), re.MULTILINE)
    assert len(found) > 5
    return [re.sub(r"{{.*}}|%s", values.get(each.split("=")[0], "team"), each) for each in found]


def test_the_operator_accepts_the_arguments_of_the_deployment() -> None:
    words = {"--etcd-image": "etcd:1", "--agent-metrics-port": "9000", "--log-level": "error", "--log-format": "json"}
    given = arguments(words)
    assert {"--leader-elect", "--no-leader-elect"} <= set(given)
    settings = parse([each for each in given if each != "--no-leader-elect"], {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert settings == OperatorSettings(
        namespaces=("team",),
        etcd_secrets_namespaces=("team",),
        etcd_endpoints=("team",),
        pods=PodSettings(
            etcd_image="etcd:1", agent_metrics_port=9000, network_policies=False, metrics_namespaces=("team",)
        ),
        leader_elect=True,
        lease_namespace="team",
        lease_name="team",
        log_level="error",
        log_format="json",
        identity=settings.identity,
        listen=("", 8080),
        in_pod=True,
    )
    assert "containerPort: 8080\n" in template("deployment.yaml")


def test_the_default_values_match_the_operators_defaults() -> None:
    operator = OperatorSettings()
    assert VALUES["etcd"]["image"] == operator.pods.etcd_image
    assert VALUES["agent"]["metricsPort"] == operator.pods.agent_metrics_port
    assert VALUES["leaderElection"] is operator.leader_elect
    assert VALUES["logging"] == {"level": operator.log_level, "format": operator.log_format}
    logging = SCHEMA["properties"]["logging"]["properties"]
    assert logging["level"]["enum"] == list(LOG_LEVELS)
    assert logging["format"]["enum"] == list(LOG_FORMATS)


def test_the_rbac_rules_are_minimal() -> None:
    found = re.search(r'define "elastic-operator.rules" -}}\n(.*?){{- end', template("_helpers.tpl"), re.DOTALL)
    assert found
    rights = {
        (group, resource): set(rule["verbs"])
        for rule in yaml.safe_load(found[1])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    owned = {"list", "watch", "create", "delete"}
    assert rights == {
        ("elastic.pytorch.org", "elasticjobs"): {"list", "watch", "delete"},
        ("elastic.pytorch.org", "elasticjobs/status"): {"update"},
        ("elastic.pytorch.org", "elasticjobs/scale"): {"patch"},
        ("", "pods"): owned | {"patch"},
        ("", "services"): owned,
        ("apps", "deployments"): owned | {"patch"},
        ("", "secrets"): {"create", "patch"},
        ("policy", "poddisruptionbudgets"): owned | {"patch"},
        ("networking.k8s.io", "networkpolicies"): owned | {"patch"},
        ("scheduling.x-k8s.io", "podgroups"): {"list", "create", "patch", "delete"},
        ("scheduling.volcano.sh", "podgroups"): {"list", "create", "patch", "delete"},
        ("", "configmaps"): {"get", "create", "patch"},
        ("", "events"): {"list", "create"},
    }


def test_no_rbac_rule_has_a_wildcard() -> None:
    texts = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    assert not re.search(r"""["'\[ ]\*["'\] ,]""", re.sub(r"/\*.*?\*/", "", texts, flags=re.DOTALL))


def test_the_documentation_lists_every_value_and_its_default() -> None:
    rows = dict(
        re.findall(r"^\| `([\w.]+)` \| (.*?) \| .+ \|$", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE)
    )
    assert rows.keys() == set(leaves(VALUES))
    for path, documented in rows.items():
        value: Any = VALUES
        for name in path.split("."):
            value = value[name]
        if path != "resources":
            assert documented == f"`{value if value and isinstance(value, str) else json.dumps(value)}`", path
