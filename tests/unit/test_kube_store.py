"""The store of objects: lists, watches and writes in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.kubernetes.client import DEPLOYMENTS, ELASTIC_JOBS, PODS
from elastic_operator.kubernetes.store import Store, owner_of, version_of
from tests.support import cluster_objects

if TYPE_CHECKING:
    import random

JOB = cluster_objects.job
KEY = "team/digits"


def at_version(body: dict[str, Any], version: int, **metadata: Any) -> dict[str, Any]:
    """Return the object with this version and changed metadata."""
    return {**body, "metadata": {**body["metadata"], "resourceVersion": str(version), **metadata}}


def a_job(version: int = 1, **metadata: Any) -> dict[str, Any]:
    return at_version(JOB(), version, **metadata)


def a_pod(index: int = 0, version: int = 1, **metadata: Any) -> dict[str, Any]:
    pod = at_version(cluster_objects.pod(index, f"p{index}"), version, **metadata)
    for reference in pod["metadata"]["ownerReferences"]:
        reference["apiVersion"] = ELASTIC_JOBS.api_version
    return pod


class Listener:
    """Records the changed jobs and the deleted objects."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.gone: list[dict[str, Any]] = []
        self.store = Store(changed=self.changed.append, pod_deleted=lambda body, _last: self.gone.append(dict(body)))

    def pods(self) -> dict[str, int]:
        """Return the versions of the job's pods by UID."""
        found = self.store.owned_by(PODS, cluster_objects.NAMESPACE, cluster_objects.JOB_UID)
        return {pod["metadata"]["uid"]: version_of(pod) for pod in found}


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_a_job_is_found_by_its_key_and_its_pods_by_its_uid(listener: Listener) -> None:
    listener.store.put(ELASTIC_JOBS, a_job())
    listener.store.put(PODS, a_pod(0))
    listener.store.put(PODS, a_pod(1, ownerReferences=[]))

    job = listener.store.job(KEY)
    assert job is not None
    assert job["spec"] == JOB()["spec"]
    assert list(listener.pods()) == ["uid-p0"]
    assert listener.store.keys == (KEY,)
    assert listener.changed == [KEY, KEY]


def test_an_object_that_was_deleted_never_returns(listener: Listener) -> None:
    listener.store.put(PODS, a_pod(version=3))
    listener.store.remove(PODS, {"metadata": {"uid": "uid-p0"}})
    listener.store.remove(PODS, a_pod(version=5))
    listener.store.put(PODS, a_pod(version=6))
    assert listener.pods() == {}


def test_a_list_removes_the_objects_that_it_lacks_unless_they_were_created_since(listener: Listener) -> None:
    listener.store.put(PODS, a_pod(0, version=3))
    listener.store.put(PODS, a_pod(1, version=4))
    listener.store.put(PODS, a_pod(2, version=11))
    listener.store.keep_only(PODS, set(), 10, "other")
    listener.store.keep_only(PODS, {"uid-p1"}, 10)

    assert listener.pods() == {"uid-p1": 4, "uid-p2": 11}
    assert [body["metadata"]["uid"] for body in listener.gone] == ["uid-p0"]
    assert listener.changed == [KEY] * 4
    listener.store.put(PODS, a_pod(0, version=8))
    assert "uid-p0" not in listener.pods(), "the pod was created before the list"
    listener.store.put(PODS, a_pod(0, version=12))
    assert listener.pods()["uid-p0"] == 12
    listener.store.put(PODS, a_pod(0, version=13, ownerReferences=[]))
    assert "uid-p0" not in listener.pods()


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_the_newer_of_two_jobs_with_one_name_is_found_until_it_is_removed(
    listener: Listener, order: tuple[str, str]
) -> None:
    jobs = {"old": a_job(3, uid="old"), "new": a_job(8, uid="new")}
    for uid in order:
        listener.store.put(ELASTIC_JOBS, jobs[uid])
    assert uid_of(listener.store.job(KEY)) == "new"
    listener.store.remove(ELASTIC_JOBS, at_version(jobs[order[0]], 9))
    assert uid_of(listener.store.job(KEY)) == order[1]
    listener.store.remove(ELASTIC_JOBS, at_version(jobs[order[1]], 10))
    assert (listener.store.job(KEY), listener.store.keys) == (None, ())


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


def test_fields_that_are_not_read_are_not_kept(listener: Listener) -> None:
    listener.store.put(DEPLOYMENTS, a_pod(managedFields=[{}]))
    (deployment,) = listener.store.owned_by(DEPLOYMENTS, cluster_objects.NAMESPACE, cluster_objects.JOB_UID)
    assert "managedFields" not in deployment["metadata"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=40), st.randoms(use_true_random=False))
def test_changes_in_any_order_have_the_same_result(history: list[tuple[int, int]], order: random.Random) -> None:
    """Each pod has several versions; a version that is a multiple of five removes the pod."""
    lives: dict[int, set[int]] = {}
    for index, version in history:
        lives.setdefault(index, set()).add(version)
    news = [(index, version) for index, versions in lives.items() for version in versions]
    order.shuffle(news)
    listener = Listener()
    for index, version in news:
        if version % 5 == 0:
            listener.store.remove(PODS, a_pod(index, version))
        else:
            listener.store.put(PODS, a_pod(index, version))

    assert listener.pods() == {
        f"uid-p{index}": max(versions) for index, versions in lives.items() if max(versions) % 5 != 0
    }


def uid_of(job: Any) -> str:
    return str(job["metadata"]["uid"])
