"""The manifests that the CRD accepts and rejects, and the error sentences of `elasticjob`."""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from elastic_operator.api.spec import GROUP, KIND, VERSION, ElasticJobSpec
from elastic_operator.api.validation import error_list
from elastic_operator.manifest import crd

MANIFESTS = Path(__file__).parents[2] / "manifests"
SAMPLES = [yaml.safe_load(path.read_text()) for path in sorted(MANIFESTS.glob("*.yaml"))]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=10,
)


def job(**spec: Any) -> dict[str, Any]:
    """Return a valid job with these additional fields of the spec."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": "digits"},
        "spec": {"maxReplicas": 3, "image": "elastic-agent:dev", "args": ["digits.py"], **spec},
    }


def without(field: str) -> dict[str, Any]:
    """Return a job without this field of the spec."""
    made = job()
    del made["spec"][field]
    return made


def named(name: str, **metadata: Any) -> dict[str, Any]:
    """Return a job with this name."""
    return {**job(), "metadata": {"name": name, **metadata}}


def rule(action: str = "FailJob", **fields: Any) -> dict[str, Any]:
    """Return a job with one rule for failures."""
    return job(failurePolicy={"rules": [{"action": action, **fields}]})


ARCHIVED: dict[str, Any] = {
    "replicaSpecs": {
        "Worker": {
            "replicas": 2,
            "restartPolicy": "ExitCode",
            "template": {
                "apiVersion": "v1",
                "kind": "Pod",
                "spec": {"containers": [{"name": "elasticjob-worker", "image": "i", "args": ["train.py"]}]},
            },
        }
    }
}
"""The equivalent of image, args and template in a manifest of the first controller."""


def archived(**spec: Any) -> dict[str, Any]:
    """Return a valid job of the first controller with these additional fields of the spec."""
    return {**job(), "spec": {"maxReplicas": 3, **ARCHIVED, **spec}}


def fixed(**spec: Any) -> dict[str, Any]:
    """Return a job of the first controller whose number of pods, 2, is also the upper bound."""
    made = archived(**spec)
    del made["spec"]["maxReplicas"]
    return made


def fields(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every path in a schema, with the schema at that path."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from fields(below, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from fields(schema[name], f"{path}[]")


FIELDS = dict(fields(crd.schema()))
BELOW_SPEC_AND_STATUS = {path: schema for path, schema in FIELDS.items() if re.match(r"\.(spec|status)", path)}


# The definition itself


def test_every_field_is_described() -> None:
    items = {path for path in BELOW_SPEC_AND_STATUS if path.endswith("[]")}
    undescribed = {path for path, schema in BELOW_SPEC_AND_STATUS.items() if not schema.get("description")}
    assert undescribed <= items


def test_every_field_has_bounds() -> None:
    bounds = {
        "string": {"maxLength"},
        "integer": {"minimum", "maximum"},
        "array": {"maxItems", "x-kubernetes-list-type"},
    }
    unbounded = {
        path
        for path, schema in BELOW_SPEC_AND_STATUS.items()
        if not bounds.get(schema.get("type", ""), set()) <= schema.keys()
        or ("additionalProperties" in schema and "maxProperties" not in schema)
        or (schema.get("x-kubernetes-int-or-string") and "maxLength" not in schema)
        or (schema.get("x-kubernetes-preserve-unknown-fields") and "maxProperties" not in schema)
    }
    assert unbounded == set()


def test_the_local_check_supports_every_keyword_of_the_definition() -> None:
    understood = Draft202012Validator.VALIDATORS.keys() | crd.KEYWORDS.keys() | {"default", "description"}
    understood |= {"x-kubernetes-validations", "x-kubernetes-preserve-unknown-fields"}
    assert {(path, key) for path, schema in FIELDS.items() for key in schema.keys() - understood} == set()
    patterns = [schema["pattern"] for schema in FIELDS.values() if "pattern" in schema]
    assert all(re.fullmatch(r"\^[^$]+\$", pattern) for pattern in patterns)
    assert {schema.get("x-kubernetes-list-type") for schema in FIELDS.values()} <= {None, "atomic", "map", "set"}


def test_the_typed_spec_has_each_field_of_the_spec() -> None:
    typed = set(ElasticJobSpec.__struct_encode_fields__)
    declared = FIELDS[".spec"]["properties"].keys() - {"managedBy", "rdzvEndpoint", "replicaSpecs", "RunPolicy"}
    assert declared == typed - {"firstReplicas", "unsupportedReason"}


# Valid manifests


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample["metadata"]["name"] for sample in SAMPLES])
def test_the_samples_are_accepted(sample: dict[str, Any]) -> None:
    assert crd.validate(sample) == []


@pytest.mark.parametrize(
    "spec",
    [
        {"args": None, "command": ["python", "digits.py"]},
        {"etcd": {"endpoint": "a:1,b:9999,c:10000,d:59999,e:64999,f:65499,g:65529,h:65535"}},
        {"etcd": {"endpoint": "https://a:2379,https://[fd00::1]:2379"}},
        {"template": {"spec": {"anything": {"goes": [None, 2**80]}}}},
        {"env": [{"name": "A"}, {"name": "B", "value": ""}, {"name": "_c.d-e"}]},
        {"schedulingPolicy": {"gang": "SchedulerPlugins", "schedulerName": "mine", "priorityClassName": "high"}},
        {"rendezvous": {"ports": {"first": 20000, "last": 20015}}},
        {"etcd": {"endpoint": "https://etcd", "tlsSecret": "etcd-client"}},
    ],
    ids=str,
)
def test_a_spec_is_accepted(spec: dict[str, Any]) -> None:
    assert crd.validate(job(**spec)) == []


def test_only_the_field_names_of_a_status_are_checked() -> None:
    assert crd.validate({**job(), "status": {"state": "Whatever"}}) == []
    [problem] = crd.validate({**job(), "status": {"stage": "Running"}})
    assert str(problem) == "status.stage: there is no such field; did you mean state?"


def test_metadata_that_an_api_server_has_completed_is_accepted() -> None:
    filled = named(
        "digits",
        namespace="default",
        uid="1",
        generation=2,
        creationTimestamp=None,
        labels={"a": "b", "example.org/x": ""},
        annotations={"Example.org/Why": "any text"},
        finalizers=["example.org/f"],
        ownerReferences=[{"uid": "2"}],
    )
    assert crd.validate(filled) == []


# Invalid manifests

REFUSED: list[tuple[Any, str]] = [
    ({"kind": KIND}, "apiVersion: this field is missing; write apiVersion: elastic.pytorch.org/v1alpha1"),
    ({**job(), "apiVersion": "apps/v1"}, "apiVersion: is apps/v1, expected elastic.pytorch.org/v1alpha1"),
    ({**job(), "kind": "Deployment"}, "kind: is Deployment, expected ElasticJob"),
    ({key: value for key, value in job().items() if key != "spec"}, "spec: this field is missing; it must be set"),
    ({**job(), "spec": "x"}, "spec: 'x' is not of type 'object'"),
    # Metadata
    (
        {key: value for key, value in job().items() if key != "metadata"},
        "metadata.name: this field is missing; it must be set",
    ),
    ({**job(), "metadata": []}, "metadata: [] is not of type 'object'"),
    (named(""), "metadata.name: must begin with a lowercase letter"),
    (named("Digits"), "metadata.name: must begin with a lowercase letter"),
    (named("a", lables={}), "metadata.lables: there is no such field; did you mean labels?"),
    (named("a", labels={"x/y": 1}), "metadata.labels[x/y]: 1 is not a string; put it into quotes"),
    # Unknown fields
    (job(maxReplica=3), "spec.maxReplica: there is no such field; did you mean maxReplicas?"),
    ({**job(), "replicas": 2}, "replicas: there is no such field at this level; it belongs below spec"),
    (job(endpoint="a"), "spec.endpoint: there is no such field at this level; it belongs below etcd"),
    (job(template={"containers": []}), "spec.template.containers: there is no such field; remove it"),
    # Types and bounds
    (without("maxReplicas"), "spec.maxReplicas: must be set; more pods than this are never created"),
    (job(maxReplicas="3"), "spec.maxReplicas: '3' is not of type 'integer'"),
    (job(image=""), "spec.image: '' should be non-empty"),
    (job(args="--lr 1"), "spec.args: '--lr 1' is not of type 'array'"),
    (job(env=[{"name": "A", "value": True}]), "spec.env[0].value: true is not a string; put it into quotes"),
    (
        job(env=[{"name": "A"}, {"name": "A"}]),
        'spec.env[1]: {"name": "A"} is in this list twice; remove one of the entries',
    ),
    (
        job(etcd={"resources": {"limits": {"cpu": 0.5}}}),
        "spec.etcd.resources.limits.cpu: 0.5 is not a string; put it into quotes",
    ),
    (
        job(etcd={"resources": {"limits": {"cpu": "1 "}}}),
        'spec.etcd.resources.limits.cpu: "1 " is not valid; expected: A quantity such as 2, "0.5", 500m',
    ),
    (
        job(checkpoint={"volume": {"nfs": {}, "csi": {}}}),
        "spec.checkpoint.volume: {'nfs': {}, 'csi': {}} has too many properties",
    ),
    # Rules that span fields
    (
        job(minReplicas=4, maxReplicas=3),
        "spec.minReplicas: must not be larger than maxReplicas;",
    ),
    (
        job(replicas=4),
        "spec.replicas: must be between minReplicas and maxReplicas;",
    ),
    (without("image"), "spec.image: must be set: the image that has the program and the agent"),
    (without("args"), "spec.args: must be set: the program and its arguments"),
    (job(env=[{"name": "1A"}]), "spec.env[0].name: must consist of"),
    (
        job(env=[{"name": "A", "value": "x", "valueFrom": {"fieldRef": {}}}]),
        "spec.env[0].value: cannot be combined with",
    ),
    (job(nprocPerNode="tpu"), "spec.nprocPerNode: must be a number from 1 to 4096"),
    (
        job(etcd={"endpoint": "a:1", "image": "b"}),
        "spec.etcd.endpoint: cannot be combined with image, resources, storage or security",
    ),
    (job(etcd={"endpoint": "a b"}), "spec.etcd.endpoint: must be host:port"),
    (job(etcd={"tlsSecret": "s"}), "spec.etcd.tlsSecret: applies only to an endpoint that begins with https://"),
    # The life of the job
    (job(managedBy="kueue"), "spec.managedBy: must be a domain, a slash and a name, such as kueue.x-k8s.io/multikueue"),
    (
        job(cleanPodPolicy="Never"),
        "spec.cleanPodPolicy: 'Never' is not one of ['All', 'Running', 'None']",
    ),
    (rule(), "spec.failurePolicy.rules[0]: must have exactly one of onExitCodes, onPodReasons and onPodConditions"),
    (
        rule(onExitCodes={"operator": "In", "values": [1]}, excludeNode=True),
        "spec.failurePolicy.rules[0].excludeNode: cannot be combined with onExitCodes: a worker that fails is started",
    ),
    (
        rule(onExitCodes={"operator": "In", "values": [3, 3]}),
        "spec.failurePolicy.rules[0].onExitCodes.values[1]: 3 is in this list twice; remove one of the entries",
    ),
    (job(schedulingPolicy={"queue": "q"}), "spec.schedulingPolicy.queue: applies only to Volcano's PodGroup"),
    (
        job(rendezvous={"ports": {"first": 2000, "last": 2014}}),
        "spec.rendezvous.ports.last: must be at least 15 above first:",
    ),
    (
        {**job(), "spec": {"maxReplicas": 3, "args": ["a"], "template": {"metadata": {}}}},
        "spec.image: must be set: the image that has the program and the agent (or a template whose container named",
    ),
    # Manifests of the first controller
    (
        job(**ARCHIVED),
        "spec.replicaSpecs: belongs to manifests of the first controller and cannot be combined with image",
    ),
    (
        job(rdzvEndpoint="etcd:2379"),
        "spec.rdzvEndpoint: belongs to manifests of the first controller, … write etcd.endpoint",
    ),
    (
        job(RunPolicy={"backoffLimit": 3}),
        "spec.RunPolicy: belongs to manifests of the first controller, which have replica",
    ),
    (
        archived(rdzvEndpoint="etcd:2379", etcd={"image": "i"}),
        "spec.rdzvEndpoint: cannot be combined with etcd, which has the same meaning; remove one of them",
    ),
    (archived(rdzvEndpoint="<your_etcd_endpoint>:<your_etcd_port>"), "spec.rdzvEndpoint: must be host:port, such as"),
    (
        archived(minReplicas=3, maxReplicas=4),
        "spec.replicaSpecs.Worker.replicas: must be between minReplicas and maxReplicas; change it, or move",
    ),
    (
        fixed(minReplicas=3),
        "spec.minReplicas: must not be larger than replicaSpecs.Worker.replicas, which is also the upper bound",
    ),
    (
        fixed(replicas=3),
        "spec.replicas: must not be larger than replicaSpecs.Worker.replicas, which is also the upper bound",
    ),
]


def begins(message: str, sentence: str) -> bool:
    """Return whether a message begins with the sentence; … in the sentence matches any text."""
    return re.match(".*".join(map(re.escape, sentence.split("…"))), message) is not None


@pytest.mark.parametrize(("manifest", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_a_mistake_is_refused_with_a_sentence_that_names_the_field(manifest: dict[str, Any], sentence: str) -> None:
    [problem] = crd.validate(manifest)
    assert begins(str(problem), sentence), str(problem)


def test_these_examples_break_every_rule_of_the_definition() -> None:
    problems = [problem for manifest, _ in REFUSED for problem in crd.validate(manifest)]
    problems += [problem for old, new, _ in STAYS for problem in crd.validate(new, old=running(old))]
    reported = "\n".join(map(str, problems))
    rules = [rule for schema in FIELDS.values() for rule in schema.get("x-kubernetes-validations", ())]
    assert len(rules) >= 30
    assert [rule["message"] for rule in rules if rule["message"] not in reported] == []
    # Several rules for changes share one message, so the test also compares the fields.
    of_spec = [
        f".spec{rule['fieldPath']}" for rule in FIELDS[".spec"]["x-kubernetes-validations"] if is_about_changes(rule)
    ]
    of_job = [rule["fieldPath"] for rule in FIELDS[""]["x-kubernetes-validations"] if is_about_changes(rule)]
    assert {*of_spec, *of_job} == {f".spec.{field}" for _, _, field in STAYS}


def test_all_problems_are_reported_at_once() -> None:
    problems = crd.validate(job(maxReplicas="3", minReplica=1, args="x"))
    assert {problem.path for problem in problems} == {"spec.maxReplicas", "spec.minReplica", "spec.args"}
    first, *others = error_list(problems).splitlines()
    assert first.endswith("; and 2 more problems:")
    assert len(others) == 2


# Changes of the number of pods


def changed(old: dict[str, Any], **spec: Any) -> list[str]:
    """Return the paths of the problems that a change of these fields of the spec causes."""
    new = copy.deepcopy(old)
    new["spec"] |= spec
    return [problem.path for problem in crd.validate(new, old=old)]


def test_replicas_must_be_in_range_only_if_it_is_changed() -> None:
    assert changed(job(replicas=3), maxReplicas=2) == []
    assert changed(job(replicas=1), minReplicas=2) == []
    assert changed(job(replicas=5), maxRestarts=3) == []
    assert changed(job(replicas=5), replicas=3) == []
    assert crd.validate(job(), old=job(replicas=5)) == []
    for before in (job(), job(replicas=2), job(replicas=5), job(replicas=None)):
        assert changed(before, replicas=4) == ["spec.replicas"]
    assert changed(job(minReplicas=2, replicas=2), maxReplicas=1) == ["spec.minReplicas"]


# Fields that cannot change while a job runs


def is_about_changes(rule: Mapping[str, Any]) -> bool:
    """Return whether a rule applies only to changes."""
    return "oldSelf" in rule["rule"] and not rule.get("optionalOldSelf")


RULES = [{"action": "Ignore", "onExitCodes": {"operator": "In", "values": [3]}}]
STAYS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (job(), job(image="other"), "image"),
    (job(), job(nprocPerNode=2), "nprocPerNode"),
    (job(metricsPort=1), job(metricsPort=2), "metricsPort"),
    (job(gracePeriodSeconds=5), job(), "gracePeriodSeconds"),
    (job(), job(nodeLossSeconds=16), "nodeLossSeconds"),
    (job(), job(rendezvous={"leaseSeconds": 5}), "rendezvous"),
    (job(rendezvous={"leaseSeconds": 5}), job(rendezvous={"leaseSeconds": 6}), "rendezvous"),
    (job(), job(schedulingPolicy={"gang": "Volcano"}), "schedulingPolicy"),
    (job(), job(failurePolicy={"rules": RULES}), "failurePolicy"),
    (job(failurePolicy={"rules": RULES}), job(failurePolicy={"rules": [*RULES, *RULES]}), "failurePolicy"),
    (job(etcd={"image": "i"}), job(etcd={"image": "j"}), "etcd.image"),
    (job(etcd={"image": "i"}), job(), "etcd.image"),
    (job(), job(etcd={"security": "None"}), "etcd.security"),
    (job(etcd={"endpoint": "https://a"}), job(etcd={"endpoint": "https://a", "tlsSecret": "s"}), "etcd.tlsSecret"),
    (job(etcd={"endpoint": "a:1"}), job(etcd={"endpoint": "b:1"}), "etcd.endpoint"),
    (job(etcd={"endpoint": "a:1"}), job(), "etcd.endpoint"),
    (job(etcd={"resources": {}}), job(etcd={"endpoint": "a:1"}), "etcd.endpoint"),
    (job(), job(etcd={"endpoint": "a:1"}), "etcd.endpoint"),
    (archived(rdzvEndpoint="a:1"), archived(rdzvEndpoint="b:1"), "etcd.endpoint"),
    (job(), job(managedBy="example.org/other"), "managedBy"),
    (job(managedBy="example.org/other"), job(), "managedBy"),
    (
        archived(replicas=2),
        archived(
            replicas=2,
            replicaSpecs={"Worker": {"replicas": 3, "template": ARCHIVED["replicaSpecs"]["Worker"]["template"]}},
        ),
        "replicaSpecs.Worker.replicas",
    ),
]
"""Jobs, changed jobs that are refused while the jobs run, and the fields that the problems name."""


@pytest.mark.parametrize(("old", "new", "field"), STAYS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_that_pods_are_created_from_cannot_change_while_the_job_runs(
    old: dict[str, Any], new: dict[str, Any], field: str
) -> None:
    [problem] = crd.validate(new, old=running(old))
    assert problem.path == f"spec.{field}"


def running(manifest: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Return the job while its pods run."""
    return {**manifest, "status": {"replicas": 2, **status}}


def suspended(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the job with spec.suspend set."""
    return {**manifest, "spec": {**manifest["spec"], "suspend": True}}


ALWAYS = {"managedBy", "replicaSpecs.Worker.replicas"}


@pytest.mark.parametrize(("old", "new", "field"), STAYS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_that_pods_are_created_from_can_change_while_the_job_is_suspended(
    old: dict[str, Any], new: dict[str, Any], field: str
) -> None:
    refused = [f"spec.{field}"] if field in ALWAYS else []
    trained = {"replicas": 0, "startTime": "2026-01-01T00:00:00Z"}
    for changed in (suspended(new), new):  # the second one also resumes the job
        assert [problem.path for problem in crd.validate(changed, old=running(suspended(old), **trained))] == refused
    # While a job is being suspended, its pods still use their store.
    refused_at_once = ["spec.etcd.endpoint"] if field == "etcd.endpoint" else refused
    assert [problem.path for problem in crd.validate(suspended(new), old=running(old))] == refused_at_once
    assert len(crd.validate(new, old=running(old, **trained))) == 1


# Manifests of the first controller


def test_defaults_replace_missing_and_null_fields() -> None:
    policy = {"rules": [{"action": "Count", "onPodConditions": [{"type": "DisruptionTarget"}]}]}
    inside = {"containers": [{"name": "worker", "command": None}]}
    manifest = job(replicas=None, maxRestarts=None, failurePolicy=policy, template={"spec": inside})
    before = copy.deepcopy(manifest)
    spec = crd.apply_defaults(manifest)["spec"]
    assert crd.validate(manifest) == []
    assert manifest == before, "the manifest itself is not changed"
    numbers = {"minReplicas": 1, "nprocPerNode": 1, "maxRestarts": 100, "nodeLossSeconds": 15, "spares": 0}
    others = {"suspend": False, "cleanPodPolicy": "Running", "disruptionBudget": False}
    rest = {"failurePolicy", "template"}
    assert {key: spec[key] for key in spec.keys() - rest} == {**job()["spec"], **numbers, **others}
    [rule] = spec["failurePolicy"]["rules"]
    assert (rule["onPodConditions"][0]["status"], rule["excludeNode"]) == ("True", False)
    assert spec["template"]["spec"] == inside, "opaque values keep their nulls"
    without_any = {"minReplicas": 1, "maxReplicas": 3}
    assert ElasticJobSpec.of(without_any) == ElasticJobSpec.of(crd.apply_defaults({"spec": without_any})["spec"])
    assert ElasticJobSpec.of(crd.apply_defaults(job(maxRestarts=7))["spec"]).backoff_limit == 7


# Any input


@given(manifest=st.dictionaries(st.sampled_from(["apiVersion", "kind", "metadata", "spec", "status"]), JSON))
def test_an_object_with_random_fields_is_refused(manifest: dict[str, Any]) -> None:
    assert crd.validate(manifest)
    assert crd.validate({**job(), "metadata": manifest.get("metadata")})


@given(spec=st.dictionaries(st.sampled_from(sorted(FIELDS[".spec"]["properties"])), JSON))
def test_problems_with_any_value_are_sentences_and_defaults_do_not_change_them(spec: dict[str, Any]) -> None:
    problems = crd.validate(job(**spec))
    for problem in problems:
        assert problem.path.startswith("spec")
        assert re.fullmatch(r".{8,}", problem.message), problem
    defaulted = crd.apply_defaults(job(**spec))
    assert crd.apply_defaults(defaulted) == defaulted
    assert crd.validate(defaulted) == problems
