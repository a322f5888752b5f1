"""Manifests are read as by kubectl, and each mistake is reported in one sentence with file, line and field."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.api.spec import (
    ExitCodes,
    FailureAction,
    FailureRule,
    GangScheduler,
    PodCondition,
    PortRange,
    RendezvousSpec,
    SchedulingSpec,
)
from elastic_operator.errors import BadInput
from elastic_operator.manifest import loader as manifest
from elastic_operator.manifest.loader import MAX_BYTES

MANIFESTS = Path(__file__).parents[2] / "manifests"
HEAD = "apiVersion: elastic.pytorch.org/v1alpha1\nkind: ElasticJob\nmetadata: {name: digits}\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(content: str | bytes, name: str = "job.yaml") -> str:
    """Return the error message for a file with this content."""
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput) as caught:
        manifest.load_checked(Path(name))
    return str(caught.value)


# Valid manifests


def test_a_job_is_read_with_its_defaults_and_its_namespace() -> None:
    job = manifest.load_checked(MANIFESTS / "digits.yaml")
    assert (job.name, job.namespace) == ("digits", "default")
    assert (job.spec.min_replicas, job.spec.max_replicas, job.spec.replicas) == (1, 3, 2)
    assert job.spec.args == ("digits.py", "--epochs", "20")
    assert (job.spec.max_restarts, job.spec.nproc_per_node) == (100, 1)
    assert job.job["metadata"] == {"name": "digits", "namespace": "default"}
    assert job.job["spec"]["maxRestarts"] == 100
    assert job.source.data == yaml.safe_load((MANIFESTS / "digits.yaml").read_text())


def test_every_field_reaches_the_typed_form() -> None:
    job = manifest.load_checked(MANIFESTS / "everything.yaml")
    spec = job.spec
    assert job.namespace == "research"
    assert spec.command == ("python", "-m", "training")
    assert spec.env[0] == {"name": "LEARNING_RATE", "value": "0.1"}
    assert (spec.nproc_per_node, spec.max_restarts, spec.backoff_limit) == ("gpu", 7, 5)
    assert spec.suspend
    assert (spec.active_deadline, spec.ttl_after_finished, spec.clean_pod_policy) == (86400, 3600, "All")
    assert spec.failure_policy.rules == (
        FailureRule(FailureAction.FAIL_JOB, exit_codes=ExitCodes(frozenset({2, 64}), "In")),
        FailureRule(FailureAction.IGNORE, exit_codes=ExitCodes(frozenset({1, 137}), "NotIn")),
        FailureRule(FailureAction.COUNT, pod_reasons=frozenset({"OOMKilled", "Evicted"}), exclude_node=True),
        FailureRule(
            FailureAction.IGNORE, pod_conditions=(PodCondition("DisruptionTarget"), PodCondition("Ready", "Unknown"))
        ),
    )
    assert spec.scheduling == SchedulingSpec(GangScheduler.VOLCANO, "volcano-of-ours", "research", "batch")
    assert spec.rendezvous == RendezvousSpec(30, 1200, 10, PortRange(20000, 20063))
    assert (spec.grace_period, spec.node_loss, spec.disruption_budget, spec.metrics_port) == (20, 60, True, 9200)
    assert spec.etcd.image == "registry.example.org/etcd:3.5.21"
    assert spec.etcd.resources["limits"] == {"cpu": 1, "memory": "256Mi"}
    assert spec.etcd.storage == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    assert spec.checkpoint.volume == {"persistentVolumeClaim": {"claimName": "checkpoints"}}
    assert spec.template["metadata"] == {"labels": {"team": "vision"}}


def test_image_and_program_can_be_in_the_template() -> None:
    spec = manifest.load_checked(MANIFESTS / "template_only.yaml").spec
    assert (spec.image, spec.args) == (None, ())
    assert spec.etcd.endpoint == "etcd-0.etcd:2379,etcd-1.etcd:2379"


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_empty_documents_and_a_byte_order_mark_are_ignored(line_end: str) -> None:
    text = f"---\n# a comment\n---\n{HEAD}spec: {{maxReplicas: 1, image: a, args: [b]}}\n---\n"
    Path("job.yaml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", line_end).encode())
    assert manifest.load_checked(Path("job.yaml")).name == "digits"


def test_aliases_and_merges_are_supported() -> None:
    Path("job.yaml").write_text(
        f"{HEAD}spec:\n  image: &image a\n  args: [b]\n  maxReplicas: 1\n"
        "  etcd: {image: *image, resources: {limits: &all {cpu: 1, memory: 1Gi}, requests: {<<: *all, cpu: 500m}}}\n"
    )
    etcd = manifest.load_checked(Path("job.yaml")).spec.etcd
    assert etcd.image == "a"
    assert etcd.resources["requests"] == {"cpu": "500m", "memory": "1Gi"}


# Invalid manifests

SPEC = "spec:\n  image: a\n  args: [b]\n"

REFUSED: list[tuple[str, str | bytes, str]] = [
    ("empty", "", "job.yaml: is empty; it should hold an ElasticJob"),
    (
        "several documents",
        f"{HEAD}---\n{HEAD}",
        "job.yaml:5: a second document begins here; put each job into a file of its own",
    ),
    ("a text", "digits.py", 'job.yaml: should begin with apiVersion, kind, metadata and spec, but holds "digits.py"'),
    ("not UTF-8", HEAD.encode() + b"# \xe9t\xe9\n", "job.yaml:4: is not UTF-8; save it in that encoding (is it the"),
    (
        "a binary file",
        b"\x7fELF\x02\x01\x01\x00\x00",
        "job.yaml:1: is not YAML: the character U+007F is not allowed",
    ),
    (
        "a tab",
        "spec:\n\timage: a\n",
        "job.yaml:2:1: is not YAML: while scanning for the next token found character '\\t'",
    ),
    ("an open bracket", "spec: [a\n", "job.yaml:2:1: is not YAML: while parsing a flow sequence expected ',' or ']'"),
    (
        "a key twice",
        f"{HEAD}kind: Pod\n",
        "job.yaml:4: kind is set twice (first in line 2); remove one",
    ),
    ("a wrong tag", "a: !!int b\n", "job.yaml:1: 'b' cannot be read; put it into quotes, without a tag"),
    ("an alias of itself", "a: &a\n  b: *a\n", "job.yaml: is nested too deeply"),
    (
        "a small file with huge expanded aliases",
        "a0: &a0 [b, b, b]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 30)),
        "job.yaml: has more than 100000 values when its aliases are expanded; shorten it",
    ),
    (
        "a small file with huge expanded merges",
        "a0: &a0 {b: c}\n" + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 9}]}}\n" for n in range(1, 30)),
        "job.yaml: has more than 100000 values when its aliases are expanded; shorten it",
    ),
    ("nested too deeply", "[" * 100_000, "job.yaml: is nested too deeply"),
    ("too large", "#" * (MAX_BYTES + 1), "job.yaml: is larger than a manifest may be (256 KiB); is it the right file?"),
    (
        "an unknown field",
        f"{HEAD}{SPEC}  maxReplicas: 1\n  maxRestart: 1\n",
        "job.yaml:8: spec.maxRestart: there is no such field; did you mean maxRestarts?",
    ),
    ("a missing field", f"{HEAD}{SPEC}", "job.yaml:4: spec.maxReplicas: must be set; more pods than"),
    (
        "a number instead of a string",
        f"{HEAD}spec:\n  image: a\n  maxReplicas: 1\n  args:\n  - train.py\n  - 1e3\n",
        "job.yaml:9: spec.args[1]: 1000 is not a string; put it into quotes",
    ),
]


@pytest.mark.parametrize(("content", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_file_is_refused_with_one_sentence(content: str | bytes, sentence: str) -> None:
    refused = refusal(content)
    assert refused.startswith(sentence)
    assert "\n" not in refused


def test_problems_are_in_the_order_of_the_lines() -> None:
    refused = refusal(f"{HEAD}spec:\n  args: [1, 2]\n  maxReplica: 1\n  image: a\n  maxReplicas: x\n")
    first, *others = refused.splitlines()
    assert first == "job.yaml:5: spec.args[0]: 1 is not a string; put it into quotes; and 3 more problems:"
    assert [line.split(": ")[:2] for line in others] == [
        ["  job.yaml:5", "spec.args[1]"],
        ["  job.yaml:6", "spec.maxReplica"],
        ["  job.yaml:8", "spec.maxReplicas"],
    ]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("digts.yaml", "digts.yaml: there is no such file; check the path"),
        (".", ".: is a directory; name the manifest's file in it"),
        ("file/job.yaml", "file/job.yaml: cannot be read: Not a directory"),
        ("a" * 5000, f"{'a' * 5000}: cannot be read: File name too long"),
    ],
    ids=["missing", "directory", "below a file", "long"],
)
def test_a_file_that_cannot_be_read_is_named(path: str, sentence: str) -> None:
    Path("file").touch()
    with pytest.raises(BadInput) as caught:
        manifest.load_checked(Path(path))
    assert str(caught.value) == sentence


# YAML, as kubectl reads it

AS_KUBECTL_READS: list[tuple[str, Any]] = [
    *((text, True) for text in ("y", "Yes", "on", "True")),
    *((text, False) for text in ("n", "NO", "Off", "false")),
    *((text, None) for text in ("", "~", "null", "!!null ''")),
    *(("1", 1), ("+1", 1), ("-1", -1), ("1_000", 1000), ('!!int "1"', 1), ("08", 8)),
    *(("0x1f", 31), ("-0x1", -1), ("0b11", 3), ("017", 15)),
    *(("1e3", 1000), ("3.0", 3), ("1.5", 1.5), ("-.5", -0.5), ("1.5e-3", 0.0015), ("1e21", 1e21)),
    *((text, text) for text in ("1:30", "2001-01-01", "2001-01-01T00:00:00Z", "0x", "_1", ".", "1.2.3", "12e", "1 2")),
    *(('"1"', "1"), ("'yes'", "yes"), ("!!str 1", "1"), ("!!str", ""), (r'"\ud83d\ude00"', "😀")),
]


@pytest.mark.parametrize(("written", "read"), AS_KUBECTL_READS, ids=[repr(text[:40]) for text, _ in AS_KUBECTL_READS])
def test_a_value_is_read_as_by_kubectl(written: str, read: object) -> None:
    document = manifest.parse(f"a: {written}\n", Path("job.yaml"))
    assert document.data == {"a": read}
    assert isinstance(document.data, dict)
    assert type(document.data["a"]) is type(read)


def test_keys_are_strings() -> None:
    assert manifest.parse("1: a\nyes: b\n0x10: c\n", Path("job.yaml")).data == {"1": "a", "true": "b", "16": "c"}


def test_each_value_has_the_line_of_its_key() -> None:
    at = ("a", "b")
    document = manifest.parse("a:\n  b:\n  - c\n  -\n    d: |\n      e\n", Path("job.yaml"))
    assert document.lines == {(): 1, ("a",): 1, (*at,): 2, (*at, 0): 3, (*at, 1): 5, (*at, 1, "d"): 5}


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
        # YAML limits keys to 1024 characters, and JSON may encode one character in 12.
        lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=80), below, max_size=3),
        max_leaves=8,
    )
)
def test_json_is_read_unchanged(data: object) -> None:
    assert manifest.parse(f"a: {json.dumps(data)}\n", Path("job.yaml")).data == {"a": data}


@given(text=st.text() | st.text(alphabet=" \n\t-:[]{},&*!|>'\"#%@`?<ab1.~"))
def test_any_text_is_either_read_or_refused_with_one_sentence(text: str) -> None:
    try:
        document = manifest.parse(text, Path("job.yaml"))
    except BadInput as error:
        refused = str(error)
        assert refused.startswith("job.yaml:")
        assert "\n" not in refused
    else:
        json.dumps(document.data, allow_nan=False)
