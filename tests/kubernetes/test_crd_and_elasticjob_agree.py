"""`elasticjob` and the API server accept and refuse the same jobs, apart from the contents of the template."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_operator.api.spec import GROUP, VERSION
from elastic_operator.api.status import JobStatus, status_to_json
from elastic_operator.manifest import crd
from testbed.availability import EXHAUSTIVE
from tests.support import any_job
from tests.support.operator_namespace import manifest as job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.cluster import Cluster

pytestmark = pytest.mark.control_plane


@dataclass(frozen=True)
class Answer:
    """The server's answer: the object, or a Status with the error."""

    status: int
    body: dict[str, Any]

    @property
    def accepted(self) -> bool:
        """Whether the request succeeded; an invalid object is the only permitted reason for a failure."""
        assert self.status in {200, 201, 400, 422}, self.words
        return self.status < 300

    @property
    def words(self) -> str:
        """The status code and the message."""
        return f"{self.status} {self.body.get('message', 'accepted')}"


class ElasticJobs:
    """The jobs of a namespace, accessed over one connection, because the tests send thousands of requests."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        context = ssl.create_default_context(cafile=cluster.control_plane.authority)
        self._connection = http.client.HTTPSConnection(
            cluster.server.removeprefix("https://"), context=context, timeout=30
        )
        self._headers = {"Authorization": f"Bearer {cluster.control_plane.token}", "Content-Type": "application/json"}
        self._path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/elasticjobs"

    def close(self) -> None:
        self._connection.close()

    def create(self, manifest: dict[str, Any], *, dry_run: bool = False) -> Answer:
        return self._ask("POST", "", manifest, dry_run=dry_run)

    def replace(self, name: str, manifest: dict[str, Any]) -> Answer:
        """Replace a job; the manifest must have the job's resourceVersion."""
        return self._ask("PUT", f"/{name}", manifest)

    def replace_status(self, manifest: dict[str, Any], *, dry_run: bool = False) -> Answer:
        return self._ask("PUT", f"/{manifest['metadata']['name']}/status", manifest, dry_run=dry_run)

    def delete(self, name: str) -> None:
        answer = self._ask("DELETE", f"/{name}", None)
        assert answer.accepted, answer.words

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, *, dry_run: bool = False) -> Answer:
        query = "" if body is None else "?fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
        self._connection.request(method, self._path + path + query, json.dumps(body), self._headers)
        response = self._connection.getresponse()
        return Answer(response.status, json.loads(response.read()))


def examples(number: int) -> settings:
    """Return settings for a fixed number of reproducible examples, ten times as many with TORCHELASTIC_EXHAUSTIVE."""
    return settings(
        max_examples=number * (10 if EXHAUSTIVE else 1),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(cluster_with_crd: Cluster) -> AsyncIterator[ElasticJobs]:
    """The jobs of a namespace for these tests."""
    # celpy raises Python's recursion limit when it compiles the first rule; Hypothesis requires a constant limit.
    assert crd.validate(job("first")) == []
    async with cluster_with_crd.namespace() as name:
        jobs = ElasticJobs(cluster_with_crd, name)
        yield jobs
        jobs.close()


def assert_same(answer: Answer, new: dict[str, Any], old: dict[str, Any] | None = None) -> None:
    """Check that the API server and elasticjob both accept a job, with the same defaults, or both refuse it."""
    problems = [str(problem) for problem in crd.validate(new, old=old)]
    different = f"""
the API server says: {answer.words}
elasticjob says:     {"; ".join(problems) or "accepted"}
of:
{yaml.safe_dump(new, sort_keys=False)}
{"instead of:" if old else ""}
{yaml.safe_dump(old["spec"], sort_keys=False) if old else ""}"""
    assert answer.accepted == (not problems), different
    if answer.accepted:
        assert answer.body["spec"] == crd.apply_defaults(new)["spec"], different


SPECS = any_job.specs(crd.schema()["properties"]["spec"])


def test_each_field_is_validated_equally_at_its_bounds(server: ElasticJobs) -> None:
    verdicts = []
    different = {json.dumps(spec): spec for spec in any_job.edges(crd.schema()["properties"]["spec"])}
    for spec in different.values():
        manifest = {**job("edgy"), "spec": spec}
        answer = server.create(manifest, dry_run=True)
        assert_same(answer, manifest)
        verdicts.append(answer.accepted)
    assert verdicts.count(True) > 100
    assert verdicts.count(False) > 100


def test_metadata_and_status_are_validated_equally(server: ElasticJobs) -> None:
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


def test_any_new_job_is_validated_equally(server: ElasticJobs) -> None:
    verdicts = set()
    checked = set()

    @examples(500)
    @given(SPECS)
    def check(spec: dict[str, Any]) -> None:
        if (exactly := json.dumps(spec)) in checked:  # nearly half are drawn again
            return
        checked.add(exactly)
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
"""Statuses of a job before its first pods, with pods, and after its last pods."""


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


def test_any_other_change_is_validated_equally(server: ElasticJobs) -> None:
    verdicts: list[bool] = []

    @examples(120)
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

    @examples(150)
    @given(any_job.STATUSES)
    def check(status: JobStatus) -> None:
        answer = server.replace_status({**created, "status": status_to_json(status)}, dry_run=True)
        assert answer.accepted, answer.words

    check()
    server.delete("spoken-of")
