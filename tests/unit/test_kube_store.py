"""What the operator knows of the API server's objects, whoever tells it and in whichever order."""

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
    """The object in a version, with other metadata."""
    return {**body, "metadata": {**body["metadata"], "resourceVersion": str(version), **metadata}}


def a_job(version: int = 1, **metadata: Any) -> dict[str, Any]:
    return at_version(JOB(), version, **metadata)


def a_pod(index: int = 0, version: int = 1, **metadata: Any) -> dict[str, Any]:
    pod = at_version(cluster_objects.pod(index, f"p{index}"), version, **metadata)
    for reference in pod["metadata"]["ownerReferences"]:
        reference["apiVersion"] = ELASTIC_JOBS.api_version
    return pod


class Ears:
    """Notes whose job has changed, and what is gone."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.gone: list[dict[str, Any]] = []
        self.store = Store(changed=self.changed.append, deleted=lambda _kind, body: self.gone.append(dict(body)))

    def pods(self) -> dict[str, int]:
        """The pods of the job by UID, with their versions."""
        found = self.store.owned_by(PODS, cluster_objects.NAMESPACE, cluster_objects.JOB_UID)
        return {pod["metadata"]["uid"]: version_of(pod) for pod in found}


@pytest.fixture
def ears() -> Ears:
    return Ears()


def test_a_job_is_found_by_its_key_and_its_pods_by_its_uid(ears: Ears) -> None:
    ears.store.put(ELASTIC_JOBS, a_job())
    ears.store.put(PODS, a_pod(0))
    ears.store.put(PODS, a_pod(1, ownerReferences=[]))

    job = ears.store.job(KEY)
    assert job is not None
    assert job["spec"] == JOB()["spec"]
    assert list(ears.pods()) == ["uid-p0"]
    assert ears.store.keys == (KEY,)
    assert ears.changed == [KEY, KEY]


def test_each_state_of_a_pod_is_put_into_words_once(ears: Ears) -> None:
    ears.store.put(PODS, a_pod(0))
    (pending,) = ears.store.pods(cluster_objects.NAMESPACE, cluster_objects.JOB_UID)
    assert ears.store.pods(cluster_objects.NAMESPACE, cluster_objects.JOB_UID)[0] is pending

    ears.store.put(PODS, a_pod(0, 2, deletionTimestamp=cluster_objects.at(5)))
    (going,) = ears.store.pods(cluster_objects.NAMESPACE, cluster_objects.JOB_UID)
    assert (pending.terminating, going.terminating) == (False, True)

    ears.store.remove(PODS, a_pod(0, 3))
    assert ears.store.pods(cluster_objects.NAMESPACE, cluster_objects.JOB_UID) == ()


def test_an_older_version_overwrites_nothing_and_the_same_one_is_no_news(ears: Ears) -> None:
    ears.store.put(PODS, a_pod(version=12))
    ears.store.put(PODS, a_pod(version=9))
    ears.store.put(PODS, a_pod(version=12))

    assert ears.pods() == {"uid-p0": 12}
    assert ears.changed == [KEY]


def test_what_is_gone_does_not_come_back_with_late_news(ears: Ears) -> None:
    ears.store.put(PODS, a_pod(version=3))
    ears.store.remove(PODS, a_pod(version=7))
    ears.store.put(PODS, a_pod(version=5))

    assert ears.pods() == {}
    assert [version_of(body) for body in ears.gone] == [7]


def test_what_is_gone_before_it_was_known_is_not_known_afterwards(ears: Ears) -> None:
    ears.store.remove(PODS, a_pod(version=7))
    ears.store.put(PODS, a_pod(version=5))

    assert ears.pods() == {}
    assert ears.gone == []


def test_what_left_the_watch_comes_back_with_a_newer_version_and_with_no_other(ears: Ears) -> None:
    ears.store.put(PODS, a_pod(version=3))
    ears.store.remove(PODS, a_pod(version=7))
    ears.store.put(PODS, a_pod(version=7))
    assert ears.pods() == {}
    ears.store.put(PODS, a_pod(version=9))
    assert ears.pods() == {"uid-p0": 9}
    ears.store.remove(PODS, a_pod(version=7))
    assert ears.pods() == {"uid-p0": 9}, "news of what was before"


def test_what_a_listing_lacked_does_not_come_back_with_news_from_before_it(ears: Ears) -> None:
    ears.store.put(PODS, a_pod(version=3))
    ears.store.keep_only(PODS, set(), 10)
    ears.store.put(PODS, a_pod(version=8))
    assert ears.pods() == {}
    ears.store.put(PODS, a_pod(version=12))
    assert ears.pods() == {"uid-p0": 12}


def test_what_is_gone_for_good_comes_back_with_no_version(ears: Ears) -> None:
    ears.store.put(PODS, a_pod(version=3))
    ears.store.remove(PODS, {"metadata": {"uid": "uid-p0"}})
    ears.store.remove(PODS, a_pod(version=5))
    ears.store.put(PODS, a_pod(version=6))
    assert ears.pods() == {}


def test_a_listing_ends_what_it_lacks_but_not_what_was_made_since(ears: Ears) -> None:
    ears.store.put(PODS, a_pod(0, version=3))
    ears.store.put(PODS, a_pod(1, version=4))
    ears.store.put(PODS, a_pod(2, version=11))
    ears.store.keep_only(PODS, {"uid-p1"}, 10)

    assert ears.pods() == {"uid-p1": 4, "uid-p2": 11}
    assert [body["metadata"]["uid"] for body in ears.gone] == ["uid-p0"]
    assert ears.changed == [KEY] * 4


def test_a_listing_of_one_namespace_says_nothing_of_another(ears: Ears) -> None:
    ears.store.put(PODS, a_pod(0, version=3))
    ears.store.put(PODS, a_pod(1, version=3, namespace="other"))
    ears.store.keep_only(PODS, set(), 10, "other")

    assert list(ears.pods()) == ["uid-p0"]


def test_a_job_that_took_the_name_of_another_is_the_one_whichever_news_comes_first(ears: Ears) -> None:
    old, new = a_job(3), a_job(8, uid="new")
    ears.store.put(ELASTIC_JOBS, old)
    ears.store.put(ELASTIC_JOBS, new)
    ears.store.remove(ELASTIC_JOBS, at_version(old, 7))
    job = ears.store.job(KEY)
    assert job is not None
    assert job["metadata"]["uid"] == "new"

    ears.store.remove(ELASTIC_JOBS, at_version(new, 9))
    assert ears.store.job(KEY) is None
    assert ears.store.keys == ()


def test_of_two_jobs_of_one_name_the_later_one_counts_until_it_is_gone(ears: Ears) -> None:
    ears.store.put(ELASTIC_JOBS, a_job(8, uid="new"))
    ears.store.put(ELASTIC_JOBS, a_job(3, uid="old"))
    assert uid_of(ears.store.job(KEY)) == "new"
    ears.store.remove(ELASTIC_JOBS, a_job(9, uid="new"))
    assert uid_of(ears.store.job(KEY)) == "old"


def test_a_pod_that_changes_hands_belongs_to_nobody_here(ears: Ears) -> None:
    ears.store.put(PODS, a_pod(version=1))
    ears.store.put(PODS, a_pod(version=2, ownerReferences=[]))

    assert ears.pods() == {}
    assert ears.store.count(PODS) == 1


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


def test_what_nobody_reads_is_not_kept(ears: Ears) -> None:
    last = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "kept"}
    ears.store.put(ELASTIC_JOBS, a_job(annotations=last))
    job = ears.store.job(KEY)
    assert job is not None
    assert "managedFields" not in job["metadata"]
    assert job["metadata"]["annotations"] == {"mine": "kept"}

    ears.store.put(DEPLOYMENTS, a_pod(managedFields=[{}]))
    (deployment,) = ears.store.owned_by(DEPLOYMENTS, cluster_objects.NAMESPACE, cluster_objects.JOB_UID)
    assert "managedFields" not in deployment["metadata"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=40), st.randoms(use_true_random=False))
def test_news_in_any_order_come_to_the_same_end(history: list[tuple[int, int]], order: random.Random) -> None:
    """Each pod lives through its versions; with each that is a multiple of five, it leaves the watch."""
    lives: dict[int, set[int]] = {}
    for index, version in history:
        lives.setdefault(index, set()).add(version)
    news = [(index, version) for index, versions in lives.items() for version in versions]
    order.shuffle(news)
    ears = Ears()
    for index, version in news:
        if version % 5 == 0:
            ears.store.remove(PODS, a_pod(index, version))
        else:
            ears.store.put(PODS, a_pod(index, version))

    assert ears.pods() == {
        f"uid-p{index}": max(versions) for index, versions in lives.items() if max(versions) % 5 != 0
    }


def uid_of(job: Any) -> str:
    return str(job["metadata"]["uid"])
