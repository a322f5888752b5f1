"""docs/elasticjob.md describes exactly the existing fields and conditions, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from elastic_operator.api.constants import ConditionType
from elastic_operator.api.spec import AppliedSpec, ElasticJobSpec
from elastic_operator.api.status import JobState
from elastic_operator.api.validation import problem_of
from elastic_operator.manifest import crd

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (Path(__file__).parents[4] / "docs" / "elasticjob.md").read_text()
SPEC = crd.schema()["properties"]["spec"]["properties"]
STATUS = crd.schema()["properties"]["status"]["properties"]
ARCHIVED = {"rdzvEndpoint", "replicaSpecs", "RunPolicy"}
WHOLE = {"template", "env", "command", "args", "etcd.resources", "etcd.storage", "checkpoint.volume"}
"""Fields that have one description for all fields below them."""


def section(heading: str) -> str:
    """Return the text below a heading."""
    return re.split(r"^#+ ", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(*headings: str) -> dict[str, list[str]]:
    """Return the other cells of the table rows below these headings, by the names in the first cell."""
    found = {}
    for line in "".join(map(section, headings)).splitlines():
        if line.startswith("| `"):
            first, *others = (cell.strip() for cell in line.split("|")[1:-1])
            names = re.findall(r"`([^`]+)`", first)
            stem = names[0].rpartition(".")[0]
            found.update({stem + name if name.startswith(".") else name: others for name in names})
    return found


FIELDS = rows(
    "Program and size",
    "Lifetime and budgets",
    "Rendezvous and scheduling",
)


def leaves(properties: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the fields of a schema without subfields, or with one description for all their subfields."""
    for name, schema in properties.items():
        at = f"{path}{name}"
        below = {} if at in WHOLE else schema.get("properties", {})
        yield from leaves(below, f"{at}.") if below else [at]


def test_the_page_describes_exactly_the_fields_of_the_spec() -> None:
    of_today = {name: schema for name, schema in SPEC.items() if name not in ARCHIVED}
    assert {*leaves(of_today)} - {"schedulingPolicy.minAvailable"} == FIELDS.keys()
    former = rows("Manifests of the first ElasticJob controller")
    below_worker = {
        f"replicaSpecs.Worker.{name}" for name in SPEC["replicaSpecs"]["properties"]["Worker"]["properties"]
    }
    assert {"rdzvEndpoint", "RunPolicy", "schedulingPolicy.minAvailable", *below_worker} <= former.keys()


def test_the_defaults_match_the_crd() -> None:
    for name, schema in SPEC.items():
        if "default" in schema:
            default = schema["default"]
            assert FIELDS[name][0] == f"`{str(default).lower() if isinstance(default, bool) else default}`"


def test_fields_marked_any_time_can_change_while_the_job_runs() -> None:
    described = {name for name, (_, changes, _) in FIELDS.items() if changes.startswith("any time")}
    about_changes = [rule for rule in crd.schema()["x-kubernetes-validations"] if "oldSelf" in rule["rule"]]
    refused = {rule["fieldPath"].removeprefix(".spec.").partition(".")[0] for rule in about_changes}
    assert described == SPEC.keys() - {*ARCHIVED, "managedBy"} - refused - {*AppliedSpec.__struct_encode_fields__}


def test_fields_marked_suspended_cannot_change_while_the_job_runs() -> None:
    described = {name for name, (_, changes, _) in FIELDS.items() if changes.startswith("suspended")}
    about_changes = [rule for rule in crd.schema()["x-kubernetes-validations"] if "oldSelf" in rule["rule"]]
    refused = {rule["fieldPath"].removeprefix(".spec.") for rule in about_changes}
    assert {name for name in FIELDS if any(f"{name}.".startswith(f"{field}.") for field in refused)} == described
    assert {name for name, (_, changes, _) in FIELDS.items() if changes == "never"} == {"managedBy"}


def test_the_page_describes_the_fields_of_a_failure_rule() -> None:
    properties = SPEC["failurePolicy"]["properties"]["rules"]["items"]["properties"]
    assert rows("When something fails").keys() == properties.keys()


def test_the_page_describes_every_public_field_of_the_status() -> None:
    described = rows("The status").keys() - {str(kind) for kind in ConditionType}
    assert described == STATUS.keys() - {
        "countedPodUIDs",
        "sizeGeneration",
        "selector",
        "readyDesired",
        "observedGeneration",
    }
    assert {str(kind) for kind in ConditionType} <= rows("The status").keys()
    assert all(f"`{state}`" in rows("The status")["state"][0] for state in JobState)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_examples_are_accepted(number: int) -> None:
    example = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[number])
    job = {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "a"},
        "spec": {"maxReplicas": 1, "image": "i", "args": ["a"], **example},
    }
    assert crd.validate(example if "kind" in example else job) == []


def test_the_archived_example_has_the_described_meaning_and_can_be_replaced_with_the_current_example() -> None:
    examples = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
    former, rewritten = (crd.apply_defaults(example) for example in examples[1:])
    assert crd.validate(rewritten, old={**former, "status": {"replicas": 2, "startTime": "2026-01-01T00:00:00Z"}}) == []
    meant, means = (ElasticJobSpec.of(manifest["spec"]) for manifest in (former, rewritten))
    assert (meant.nproc_per_node, meant.etcd.endpoint) == (4, "etcd-service:2379")
    assert (means.desired, means.max_restarts, means.backoff_limit) == (2, meant.max_restarts, meant.backoff_limit)


def test_each_flag_that_only_the_operator_sets_is_refused() -> None:
    rejected = section("Program and size").split("only the operator may set")[1].split("The message")[0]
    flags = re.findall(r"`(--[a-z-]+)`", rejected)
    assert len(flags) == 9
    for flag in flags:
        words = (flag,) if flag == "--standalone" else (flag, "1")
        spec = ElasticJobSpec(min_replicas=1, max_replicas=1, image="i", args=(*words, "x.py"))
        assert str(problem_of(spec)).startswith(f"the flag {flag} in args is reserved for the operator")
    spec = ElasticJobSpec(min_replicas=1, max_replicas=1, image="i", args=("--tee", "3", "--log-dir=x", "x.py"))
    assert problem_of(spec) is None
