"""The cache of objects: lists, watches and writes in any order."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.kubernetes.backend import job_of
from elastic_operator.kubernetes.client import DEPLOYMENTS, ELASTIC_JOBS, PODS
from elastic_operator.kubernetes.object_cache import ObjectCache, owner_of, version_of
from tests.support import cluster_objects

if TYPE_CHECKING:
    import random

KEY = "team/digits"


def at_version(body: dict[str, Any], version: int, **metadata: Any) -> dict[str, Any]:
    """Return the object with this version and changed metadata."""
    return {**body, "metadata": {**body["metadata"], "resourceVersion": str(version), **metadata}}


def a_job(version: int = 1, **metadata: Any) -> dict[str, Any]:
    return at_version(cluster_objects.job(), version, **metadata)


def a_pod(index: int = 0, version: int = 1, **metadata: Any) -> dict[str, Any]:
    pod = at_version(cluster_objects.pod(index, f"p{index}"), version, **metadata)
    for reference in pod["metadata"]["ownerReferences"]:
        reference["apiVersion"] = ELASTIC_JOBS.api_version
    return pod


class RecordingCache:
    """A cache that records the changed jobs and the deleted objects."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.deleted: list[dict[str, Any]] = []
        self.cache = ObjectCache(
            changed=self.changed.append, pod_deleted=lambda body, _last: self.deleted.append(dict(body))
        )

    def pods(self) -> dict[str, int]:
        """Return the versions of the job's pods by UID."""
        found = self.cache.owned_by(PODS, cluster_objects.NAMESPACE, cluster_objects.JOB_UID)
        return {pod["metadata"]["uid"]: version_of(pod) for pod in found}


@pytest.fixture
def recording() -> RecordingCache:
    return RecordingCache()


def test_a_job_is_found_by_its_key_and_its_pods_by_its_uid(recording: RecordingCache) -> None:
    recording.cache.put(ELASTIC_JOBS, a_job())
    recording.cache.put(PODS, a_pod(0))
    recording.cache.put(PODS, a_pod(1, ownerReferences=[]))

    job = recording.cache.job(KEY)
    assert job is not None
    assert job["spec"] == cluster_objects.job()["spec"]
    assert list(recording.pods()) == ["uid-p0"]
    assert recording.cache.keys == (KEY,)
    assert recording.changed == [KEY, KEY]


def test_an_object_that_was_deleted_never_returns(recording: RecordingCache) -> None:
    recording.cache.put(PODS, a_pod(version=3))
    recording.cache.remove(PODS, {"metadata": {"uid": "uid-p0"}})
    recording.cache.remove(PODS, a_pod(version=5))
    recording.cache.put(PODS, a_pod(version=6))
    assert recording.pods() == {}


def test_list_removes_missing_objects_unless_they_are_newer(recording: RecordingCache) -> None:
    recording.cache.put(PODS, a_pod(0, version=3))
    recording.cache.put(PODS, a_pod(1, version=4))
    recording.cache.put(PODS, a_pod(2, version=11))
    recording.cache.remove_unlisted(PODS, set(), 10, "other")
    recording.cache.remove_unlisted(PODS, {"uid-p1"}, 10)

    assert recording.pods() == {"uid-p1": 4, "uid-p2": 11}
    assert [body["metadata"]["uid"] for body in recording.deleted] == ["uid-p0"]
    assert recording.changed == [KEY] * 4
    recording.cache.put(PODS, a_pod(0, version=8))
    assert "uid-p0" not in recording.pods(), "the pod was created before the list"
    recording.cache.put(PODS, a_pod(0, version=12))
    assert recording.pods()["uid-p0"] == 12
    recording.cache.put(PODS, a_pod(0, version=13, ownerReferences=[]))
    assert "uid-p0" not in recording.pods()


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_the_newer_of_two_jobs_with_one_name_is_found_until_it_is_removed(
    recording: RecordingCache, order: tuple[str, str]
) -> None:
    jobs = {"old": a_job(3, uid="old"), "new": a_job(8, uid="new")}
    for uid in order:
        recording.cache.put(ELASTIC_JOBS, jobs[uid])
    assert uid_of(recording.cache.job(KEY)) == "new"
    recording.cache.remove(ELASTIC_JOBS, at_version(jobs[order[0]], 9))
    assert uid_of(recording.cache.job(KEY)) == order[1]
    recording.cache.remove(ELASTIC_JOBS, at_version(jobs[order[1]], 10))
    assert (recording.cache.job(KEY), recording.cache.keys) == (None, ())


@pytest.mark.parametrize(
    "reference",
    [
        {"kind": "ElasticJob", "apiVersion": "elastic.pytorch.org/v1alpha1", "uid": "u", "name": "n"},
        {"kind": "ElasticJob", "apiVersion": "example.com/v1", "uid": "u", "name": "n", "controller": True},
        {"kind": "Job", "apiVersion": "batch/v1", "uid": "u", "name": "n", "controller": True},
    ],
)
def test_only_an_elastic_job_that_controls_an_object_is_its_owner(reference: dict[str, Any]) -> None:
    assert owner_of({"metadata": {"ownerReferences": [reference]}}) is None


def test_unused_fields_are_dropped(recording: RecordingCache) -> None:
    recording.cache.put(DEPLOYMENTS, a_pod(managedFields=[{}]))
    (deployment,) = recording.cache.owned_by(DEPLOYMENTS, cluster_objects.NAMESPACE, cluster_objects.JOB_UID)
    assert "managedFields" not in deployment["metadata"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=40), st.randoms(use_true_random=False))
def test_changes_in_any_order_have_the_same_result(history: list[tuple[int, int]], order: random.Random) -> None:
    """Each pod has several versions; a version that is a multiple of five removes the pod."""
    versions_by_pod: dict[int, set[int]] = {}
    for index, version in history:
        versions_by_pod.setdefault(index, set()).add(version)
    updates = [(index, version) for index, versions in versions_by_pod.items() for version in versions]
    order.shuffle(updates)
    recording = RecordingCache()
    for index, version in updates:
        if version % 5 == 0:
            recording.cache.remove(PODS, a_pod(index, version))
        else:
            recording.cache.put(PODS, a_pod(index, version))

    assert recording.pods() == {
        f"uid-p{index}": max(versions) for index, versions in versions_by_pod.items() if max(versions) % 5 != 0
    }


def uid_of(job: Any) -> str:
    return str(job["metadata"]["uid"])


_LONG = "x" * 1_300_000


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"minReplicas": 1, "maxReplicas": 3, "suspend": True, "args": [_LONG]}},
        {"spec": {"minReplicas": 1, "maxReplicas": 3, "suspend": True, "etcd": {"resources": {"limits": _LONG}}}},
        {
            "spec": {
                "minReplicas": 1,
                "suspend": True,
                "replicaSpecs": {
                    "Worker": {"replicas": 3, "template": {"spec": {"containers": [{"name": "w", "args": [_LONG]}]}}}
                },
            }
        },
        {"metadata": {"annotations": {"note": _LONG}, "labels": {"note": _LONG}}},
    ],
)
def test_a_job_that_is_too_large_takes_little_memory_and_its_spec_is_invalid(
    recording: RecordingCache, change: dict[str, Any]
) -> None:
    body = at_version(cluster_objects.job(), 1, **change.get("metadata", {}))
    recording.cache.put(ELASTIC_JOBS, {**body, "spec": change.get("spec", body["spec"])})
    kept = recording.cache.job(KEY)
    assert kept is not None
    assert len(json.dumps(kept)) < 10_000
    job = job_of(kept)
    if "spec" in change:
        assert (job.problem or "").startswith("the spec is larger than 256 KiB")
        assert (job.spec.max_replicas, job.spec.suspend) == (3, True)


def test_the_largest_jobs_take_little_more_memory_than_their_text(recording: RecordingCache) -> None:
    template = {"spec": {f"field{number}": {"a": {}} for number in range(10_000)}}  # nearly 256 KiB
    tracemalloc.start()
    for number in range(20):
        body = a_job(uid=f"uid-{number}", name=f"job-{number}")
        text = json.dumps({**body, "spec": {"template": template}, "status": {"appliedSpec": {"template": template}}})
        recording.cache.put(ELASTIC_JOBS, json.loads(text))
    del body
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 20 * len(text) * 1.5
    job = recording.cache.job("team/job-7")
    assert job is not None
    assert job["spec"]["template"] == template
