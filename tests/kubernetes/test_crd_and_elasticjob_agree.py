"""`elasticjob` and the API server accept and refuse the same jobs, apart from the contents of the template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_operator.api.status import JobStatus, status_to_json
from elastic_operator.manifest import crd
from tests.support import any_job
from tests.support.api_server import Answer, ElasticJobs
from tests.support.operator_namespace import manifest as job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.testbed.cluster import Cluster

pytestmark = pytest.mark.control_plane


def examples(number: int) -> settings:
    """Settings for a fixed number of reproducible examples."""
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(cluster_with_crd: Cluster) -> AsyncIterator[ElasticJobs]:
    """The jobs of a namespace for these tests."""
    # The first rule that it compiles makes celpy raise Python's recursion limit, and hypothesis wants that to stay.
    assert crd.validate(job("first")) == []
    async with cluster_with_crd.namespace() as name:
        await cluster_with_crd.kubectl(
            "create", "rolebinding", "owner", "--clusterrole=cluster-admin",
            f"--serviceaccount={name}:default", f"--namespace={name}",
        )  # fmt: skip
        with ElasticJobs(await cluster_with_crd.kubeconfig_for(name, "default")) as jobs:
            yield jobs


def assert_same(answer: Answer, new: dict[str, Any], old: dict[str, Any] | None = None) -> None:
    """Check that both accept with the same defaults, or that both refuse."""
    problems = [str(problem) for problem in crd.validate(new, old=old)]
    different = f"""
the API server says: {answer.words}
elasticjob says:     {"; ".join(problems) or "accepted"}
of:
{yaml.safe_dump(new, sort_keys=False)}
{"in the place of:" if old else ""}
{yaml.safe_dump(old["spec"], sort_keys=False) if old else ""}"""
    assert answer.accepted == (not problems), different
    if answer.accepted:
        assert answer.body["spec"] == crd.apply_defaults(new)["spec"], different


SPECS = any_job.specs(crd.schema()["properties"]["spec"])


def test_each_field_is_judged_the_same_at_its_bounds(server: ElasticJobs) -> None:
    verdicts = []
    for spec in any_job.edges(crd.schema()["properties"]["spec"]):
        manifest = {**job("edgy"), "spec": spec}
        answer = server.create(manifest, dry_run=True)
        assert_same(answer, manifest)
        verdicts.append(answer.accepted)
    assert verdicts.count(True) > 100
    assert verdicts.count(False) > 100


def test_metadata_and_status_are_judged_the_same(server: ElasticJobs) -> None:
    verdicts = set()
    for parts in (
        *({"metadata": metadata} for metadata in any_job.odd_metadata()),
        *({"status": status} for status in any_job.ODD_STATUSES),
    ):
        manifest = {**job("odd"), **parts}
        answer = server.create(manifest, dry_run=True)
        assert_same(answer, manifest)
        verdicts.add(answer.accepted)
    assert verdicts == {True, False}


def test_any_new_job_is_judged_the_same(server: ElasticJobs) -> None:
    verdicts = set()

    @examples(500)
    @given(SPECS)
    def check(spec: dict[str, Any]) -> None:
        manifest = {**job("any"), "spec": spec}
        answer = server.create(manifest, dry_run=True)
        assert_same(answer, manifest)
        verdicts.add(answer.accepted)

    check()
    assert verdicts == {True, False}


HOW_IT_STANDS: list[dict[str, Any]] = [
    {},
    {"replicas": 0},
    {"replicas": 2},
    {"replicas": 0, "startTime": "2026-01-01T00:00:00Z"},
]
"""Statuses of a job without pods yet, with pods, and after its pods."""


def test_each_field_changes_under_the_same_rule(server: ElasticJobs) -> None:
    verdicts = []
    for status in HOW_IT_STANDS:
        for right in (any_job.FULL, any_job.FORMER_FULL):
            whole = {**job("stepwise"), "spec": right}
            for place in right:
                less = {**whole, "spec": {key: value for key, value in right.items() if key != place}}
                for before, after in ((whole, less), (less, whole)):
                    if crd.validate(before):
                        continue
                    live = server.create(before).body
                    live = server.replace_status({**live, "status": status}).body
                    named = {"name": "stepwise", "resourceVersion": live["metadata"]["resourceVersion"]}
                    answer = server.replace("stepwise", {**after, "metadata": named})
                    assert_same(answer, {**after, "metadata": named}, live)
                    verdicts.append(answer.accepted)
                    server.delete("stepwise")
    assert verdicts.count(True) > 100
    assert verdicts.count(False) > 20


def test_any_other_change_is_judged_the_same(server: ElasticJobs) -> None:
    verdicts: list[bool] = []

    @examples(250)
    @given(st.lists(SPECS, min_size=2, max_size=4), st.sampled_from(HOW_IT_STANDS))
    def check(versions: list[dict[str, Any]], status: dict[str, Any]) -> None:
        live = server.create(job("rewritten")).body
        live = server.replace_status({**live, "status": status}).body
        try:
            for version in versions:
                named = {"name": "rewritten", "resourceVersion": live["metadata"]["resourceVersion"]}
                new = {**job("rewritten"), "spec": version, "metadata": named}
                answer = server.replace("rewritten", new)
                assert_same(answer, new, live)
                verdicts.append(answer.accepted)
                live = answer.body if answer.accepted else live
        finally:
            server.delete("rewritten")

    check()
    assert set(verdicts) == {True, False}


def test_every_possible_status_is_accepted(server: ElasticJobs) -> None:
    created = server.create(job("spoken-of")).body

    @examples(300)
    @given(any_job.STATUSES)
    def check(status: JobStatus) -> None:
        answer = server.replace_status({**created, "status": status_to_json(status)}, dry_run=True)
        assert answer.accepted, answer.words

    check()
    server.delete("spoken-of")
