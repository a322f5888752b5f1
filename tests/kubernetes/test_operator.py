"""The operator as a process, against a real API server and a real controller manager.

There is no kubelet: a test that needs a pod to run, fail or terminate acts as the kubelet. There are no agents: tests
write the records of agents to the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from elastic_operator.api.constants import worker_selector
from elastic_operator.kubernetes.client import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    ELASTIC_JOBS,
    LEASES,
    PODS,
    SECRETS,
    SERVICES,
)
from tests.support.operator_namespace import (
    Json,
    Objects,
    OperatorNamespace,
    conditions,
    holds,
    index_of,
    live,
    run_keys,
    uids,
)
from tests.support.operator_process import TIMEOUT, OperatorProcess
from torchelastic.protocol.codec import decode, encode
from torchelastic.protocol.pod import Env, TerminationMessage, encode_termination_message
from torchelastic.protocol.records import (
    HistoryRecord,
    OutcomeRecord,
    OutcomeState,
    PastRound,
    ResumeRecord,
    RunState,
    StateRecord,
    TimeBreakdown,
)
from torchelastic.store.api import Listing
from torchelastic.store.client import follow

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer
    from torchelastic.protocol.keys import RunKeys
    from torchelastic.store.api import Store

pytestmark = [pytest.mark.control_plane, pytest.mark.asyncio(loop_scope="session")]


def uid_of(found: Objects, name: str = "digits-etcd") -> str:
    return str(found[name]["metadata"]["uid"])


def holder(leases: Objects) -> str:
    return str(leases.get("elastic-operator", {}).get("spec", {}).get("holderIdentity") or "")


async def wait_until_deleted(store: Store, keys: RunKeys) -> None:
    """Wait until the store has no key of a run."""
    left: set[str] = set()
    async with asyncio.timeout(TIMEOUT), contextlib.aclosing(follow(store, keys.root)) as news:
        async for each in news:
            if isinstance(each, Listing):
                left = {entry.key for entry in each.entries}
            for change in each if isinstance(each, tuple) else ():
                (left.add if change.entry else left.discard)(change.key)
            if not left:
                return


def holder_of(operator: OperatorProcess) -> str:
    return operator.log_file.stem


async def test_a_job_gets_an_etcd_and_pods_and_leaves_nothing(ns: OperatorNamespace, operator: OperatorProcess) -> None:
    await ns.apply()
    job = await ns.wait_for_job(lambda status: status.get("replicas") == 3 and holds(status, "Waiting"))
    pods = await ns.wait_for_pods(3)
    services = await ns.wait_for(SERVICES, lambda found: "digits-etcd" in found)
    await ns.wait_for(DEPLOYMENTS, lambda found: "digits-etcd" in found)

    uid = job["metadata"]["uid"]
    address = services["digits-etcd"]["spec"]["clusterIP"]
    assert sorted(map(index_of, pods.values())) == [0, 1, 2]
    for pod in pods.values():
        assert pod["metadata"]["ownerReferences"][0]["uid"] == uid
        environment = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
        assert environment["PET_RDZV_ENDPOINT"] == f"{address}:2379"
        assert environment["PET_RDZV_ID"] == uid
        assert environment[Env.NODE_NAME] == pod["metadata"]["name"]
    assert job["status"]["selector"] == worker_selector("digits")
    assert not {"finalizers", "annotations"} & job["metadata"].keys()
    columns = (await ns.kubectl("get", "elasticjobs")).stdout.splitlines()
    assert columns[0].split() == ["NAME", "STATE", "READY", "MIN", "MAX", "RESTARTS", "AGE"]
    assert columns[1].split()[:6] == ["digits", "Pending", "0/3", "1", "3", "0"]

    # A removed etcd is created again at the same address.
    await ns.kubectl("delete", "service,deployment", "digits-etcd")
    after = await ns.wait_for(SERVICES, lambda found: "digits-etcd" in found and uid_of(found) != uid_of(services))
    assert after["digits-etcd"]["spec"]["clusterIP"] == address
    await ns.wait_for(DEPLOYMENTS, lambda found: "digits-etcd" in found)

    await ns.kubectl("delete", "elasticjob/digits")
    for resource in (PODS, SERVICES, DEPLOYMENTS, ELASTIC_JOBS):
        await ns.wait_for(resource, lambda found: not found)


async def test_the_certificates_of_an_etcd_are_written_once_and_renewed_in_time(
    ns: OperatorNamespace, tmp_path: Path
) -> None:
    note = "elastic.pytorch.org/certificate"

    def renewal(found: Objects) -> str:
        return str(found.get("digits-etcd", {}).get("metadata", {}).get("annotations", {}).get(note, ""))

    async with ns.operator(tmp_path):
        await ns.apply(replicas=1)
        first = await ns.wait_for(DEPLOYMENTS, lambda found: "digits-etcd" in found)
        written = await ns.api.get(SECRETS, ns.name, "digits-etcd")
    container = first["digits-etcd"]["spec"]["template"]["spec"]["containers"][0]
    assert "--client-cert-auth" in container["args"]
    assert written["data"].keys() == {"ca.crt", "tls.crt", "tls.key"}
    assert written["metadata"]["ownerReferences"][0]["kind"] == "ElasticJob"
    async with ns.operator(tmp_path):
        await ns.change(replicas=2)
        await ns.wait_for_pods(2)
        assert await ns.api.get(SECRETS, ns.name, "digits-etcd") == written
        address, _, secret = renewal(first).split()
        due = f"{address} 2026-01-01T00:00:00Z {secret}"
        await ns.api.patch(DEPLOYMENTS, ns.name, "digits-etcd", {"metadata": {"annotations": {note: due}}})
        await ns.wait_for(DEPLOYMENTS, lambda found: renewal(found) != due)
    renewed = await ns.api.get(SECRETS, ns.name, "digits-etcd")
    assert renewed["metadata"]["uid"] == written["metadata"]["uid"]
    assert renewed["data"]["tls.crt"] != written["data"]["tls.crt"]


async def test_replicas_are_set_once_and_scaling_keeps_the_remaining_pods(
    ns: OperatorNamespace, operator: OperatorProcess
) -> None:
    await ns.apply(maxReplicas=2)
    job = await ns.wait_for_job(lambda status: status.get("replicas") == 2)
    assert job["spec"]["replicas"] == 2
    first = await ns.wait_for_pods(2)

    await ns.change(maxReplicas=4)
    job = await ns.wait_for_job(lambda status: status.get("observedGeneration") == job["metadata"]["generation"] + 1)
    assert (job["spec"]["replicas"], job["status"]["desired"]) == (2, 2)
    await ns.kubectl("scale", "elasticjob/digits", "--replicas=3")
    assert uids(await ns.wait_for_pods(3)) > uids(first)

    await ns.change(maxReplicas=1)
    job = await ns.wait_for_job(lambda status: status.get("desired") == 1)
    assert job["spec"]["replicas"] == 3
    [left] = (await ns.wait_for_pods(1)).values()
    assert index_of(left) == 0
    await ns.wait_for_event("Scaled", "scaled from 3 to 1 pod")


@pytest.mark.parametrize("how", [[], ["--force", "--grace-period=0"]], ids=["gracefully", "by force"])
async def test_a_deleted_pod_is_replaced_by_a_pod_with_another_name(
    ns: OperatorNamespace, operator: OperatorProcess, how: list[str]
) -> None:
    await ns.apply(replicas=2)
    first = await ns.wait_for_pods(2)
    victim, other = sorted(first)
    await ns.kubectl("delete", "pod", victim, *how)

    lost = uid_of(first, victim)
    second = await ns.wait_for(
        PODS, lambda pods: lost not in uids(pods) and len(live(pods)) == 2, labels=worker_selector("digits")
    )
    assert uids(second) & uids(first) == {uid_of(first, other)}
    assert sorted(index_of(pod) for pod in second.values()) == [0, 1]
    assert victim not in second
    await ns.wait_for_event("PodDeleted", f"{victim} was deleted; a new pod takes its place")


async def test_a_failed_pod_is_replaced_counted_and_kept_for_its_log(
    ns: OperatorNamespace, operator: OperatorProcess
) -> None:
    await ns.apply(replicas=2, minReplicas=2, maxRestarts=5)
    victim = min(await ns.wait_for_pods(2))
    await ns.report_running(victim)
    last = TerminationMessage(reason="WorkerFailed", message="rank 0 found no data")
    await ns.report_ended(victim, 5, encode_termination_message(last).decode())

    await ns.wait_for_pods(2)
    job = await ns.wait_for_job(lambda status: status.get("podFailures") == 1)
    assert "rank 0 found no data" in job["status"]["lastFailure"]["message"]
    await ns.wait_for_event("PodDied", victim, "rank 0 found no data", "a new pod takes its place")
    assert victim in await ns.wait_for(PODS, lambda pods: len(pods) == 3, labels=worker_selector("digits"))

    await operator.wait_for_metric("elastic_operator_pods_created_total", 3)
    digits = {"job_namespace": ns.name, "elasticjob": "digits"}
    for name, labels, value in (
        ("pods_created_total", {}, 3),
        ("restarts_total", {"cause": "pod_died"}, 1),
        ("restarts_total", {}, 1),
        ("jobs", {"condition": "Waiting"}, 1),
        ("job_desired_pods", digits, 2),
        ("job_min_pods", digits, 2),
        ("job_restarts_total", {"cause": "pod_failed", **digits}, 1),
        ("job_backoff_limit", digits, 5),
        ("job_condition", {"condition": "Waiting", **digits}, 1),
        ("job_condition", {"condition": "Running", **digits}, 0),
    ):
        assert await operator.metric(f"elastic_operator_{name}", **labels) == value, (name, labels)
    for name in ("reconcile_duration_seconds_count", "queue_latency_seconds_count"):
        assert await operator.metric(f"elastic_operator_{name}") > 0
    assert await operator.metric("elastic_operator_api_requests_total", verb="post", code="201") > 3


@pytest.mark.parametrize(
    ("before", "spec", "words", "code", "remedy"),
    [
        (
            [],
            {"template": {"spec": {"schedulerName": "nobody", "nodeSelektor": {}}}},
            ("Invalid", 'unknown field "spec.nodeSelektor"'),
            "400",
            'patch elasticjob/digits --type=merge --patch={"spec":{"template":{"spec":{"nodeSelektor":null}}}}',
        ),
        (
            ["create quota few --hard=count/pods=1", "wait quota/few --for=jsonpath={.status.used}"],
            {"minReplicas": 3},
            ("Waiting", "exceeded quota"),
            "403",
            "delete quota few",
        ),
        (
            ["create service clusterip digits-etcd --tcp=80"],
            {"etcd": {}},
            ("Waiting", "delete it, or give the job another name"),
            "409",
            "delete service digits-etcd",
        ),
        (
            ["create secret generic digits-etcd --from-literal=password=mine"],
            {"etcd": {}},
            ("Waiting", "if it belongs to another program, delete it, or give the job another name"),
            "422",
            "delete secret digits-etcd",
        ),
    ],
    ids=["by the API server", "by a quota", "by a foreign service", "by a foreign secret"],
)
async def test_a_blocked_job_reports_the_reason_is_retried_slowly_and_delays_no_other_job(
    ns: OperatorNamespace,
    operator: OperatorProcess,
    etcd: EtcdServer,
    before: list[str],
    spec: Json,
    words: tuple[str, str],
    code: str,
    remedy: str,
) -> None:
    for command in before:
        await ns.kubectl(*command.split())
    await ns.apply(**{"etcd": {"endpoint": etcd.endpoint}, **spec})
    kind, message = words
    await ns.wait_for_job(lambda status: message in conditions(status).get(kind, {}).get("message", ""))
    if code == "403":
        await ns.wait_for_event("Warning", message)
    else:  # a full quota blocks every job
        await ns.apply("another", replicas=1)
        await ns.wait_for_pods(1, "another")
        assert await ns.wait_for_pods(0) == {}
    assert await operator.metric("elastic_operator_api_requests_total", verb="post", code=code) < 6, (
        "the operator retries in a hot loop"
    )
    await ns.kubectl(*remedy.split())
    await ns.wait_for_pods(3)
    await ns.wait_for_job(lambda status: message not in conditions(status).get(kind, {}).get("message", ""))


async def test_an_etcd_that_is_removed_with_its_job_is_not_created_again_while_pods_terminate(
    ns: OperatorNamespace, operator: OperatorProcess, etcd: EtcdServer
) -> None:
    await ns.apply(replicas=1)
    [pod] = await ns.wait_for_pods(1)
    before = await ns.wait_for(SERVICES, lambda found: "digits-etcd" in found)
    seen = {uid_of(before)}

    async def watch() -> None:
        async for state in ns.api.states(SERVICES, ns.name):
            seen.update(str(each["metadata"]["uid"]) for each in state.values())

    watching = asyncio.create_task(watch())
    await ns.bind(pod)  # the pod stays Terminating, because only a kubelet reports its termination
    finalizer = {"metadata": {"finalizers": ["example.org/held"]}}
    await ns.kubectl("patch", "elasticjob/digits", "--type=merge", f"--patch={json.dumps(finalizer)}")
    await ns.kubectl("delete", "elasticjob/digits", "--wait=false")
    await ns.wait_for(PODS, lambda found: "deletionTimestamp" in found[pod]["metadata"])
    await ns.kubectl("delete", "service,deployment", "digits-etcd")
    # The pods of a later job show that the operator has reconciled this job, too.
    await ns.apply("another", replicas=1, etcd={"endpoint": etcd.endpoint})
    await ns.wait_for_pods(1, "another")
    await ns.wait_for(SERVICES, lambda found: not found)
    watching.cancel()
    assert seen == {uid_of(before)}
    released = {"metadata": {"finalizers": None}}
    await ns.kubectl("patch", "elasticjob/digits", "--type=merge", f"--patch={json.dumps(released)}")
    await ns.kubectl("delete", f"pod/{pod}", "--force", "--grace-period=0", "--ignore-not-found")


async def test_agent_reports_in_an_external_etcd_are_read_and_removed_at_the_end(
    ns: OperatorNamespace, operator: OperatorProcess, etcd: EtcdServer
) -> None:
    job = await ns.apply(replicas=2, etcd={"endpoint": etcd.endpoint})
    keys = run_keys(job)
    pods = sorted(await ns.wait_for_pods(2))
    assert await ns.wait_for(SERVICES, lambda found: not found) == {}
    async with etcd.connected() as store:
        await ns.report_round(store, job, *pods)
        await ns.wait_for_job(lambda status: status.get("readyReplicas") == 2)
        await ns.wait_for_job(lambda status: status.get("state") == "Running" and status.get("worldSize") == 2)
        await ns.wait_for_event("Started", "training started with 2 pods and world size 2")

        # A change of size is written before a pod is deleted.
        await ns.kubectl("scale", "elasticjob/digits", "--replicas=1")
        await ns.wait_for_pods(1)
        size = await store.get(keys.size)
        assert size is not None
        assert pods[1] in size.value.decode()

        outcome = OutcomeRecord(state=OutcomeState.FAILED, round=2, restarts=3, message="rank 0 found no data")
        await store.put(keys.state, encode(StateRecord(outcome=outcome)))
        done = await ns.wait_for_job(lambda status: holds(status, "Finished"))
        assert holds(done["status"], "Failed")
        assert done["status"]["lastFailure"]["message"] == "rank 0 found no data"
        assert done["status"]["restarts"] == 3
        await ns.wait_for_pods(0)
        await wait_until_deleted(store, keys)


async def test_a_job_that_ended_during_an_operator_outage_is_not_restarted(
    ns: OperatorNamespace, operator: OperatorProcess, etcd: EtcdServer
) -> None:
    job = await ns.apply(replicas=2, etcd={"endpoint": etcd.endpoint})
    pods = await ns.wait_for_pods(2)
    await ns.wait_for_job(lambda status: status.get("replicas") == 2)
    assert await operator.stop() == 0
    async with etcd.connected() as store:
        outcome = OutcomeRecord(state=OutcomeState.SUCCEEDED, round=1)
        await store.put(run_keys(job).state, encode(StateRecord(outcome=outcome)))
    for pod in pods:
        await ns.api.delete(PODS, ns.name, pod)
    await ns.wait_for(PODS, lambda found: not found)

    operator.start()
    job = await ns.wait_for_job(lambda status: holds(status, "Finished"))
    assert job["status"]["state"] == "Succeeded"
    # The pods of a later job show that the operator has reconciled this job, too.
    await ns.apply("another", replicas=1, etcd={"endpoint": etcd.endpoint})
    await ns.wait_for_pods(1, "another")
    assert await ns.wait_for_pods(0) == {}


async def test_one_of_two_operator_replicas_leads_and_the_other_takes_over(
    ns: OperatorNamespace, tmp_path: Path
) -> None:
    async with (
        ns.operator(tmp_path, name="one", environ={"POD_NAME": "one"}) as one,
        ns.operator(tmp_path, name="two", environ={"POD_NAME": "two"}) as two,
    ):
        leases = await ns.wait_for(LEASES, lambda leases: bool(holder(leases)))
        first, second = (one, two) if holder(leases) == "one" else (two, one)
        await first.wait_until_leading()
        assert not await second.is_leading()
        await ns.apply(replicas=1)
        await ns.wait_for_pods(1)
        assert await second.metric("elastic_operator_reconciles_total") == 0

        await second.wait_for_pages(lambda codes: codes == {"/readyz": 200}, "/readyz")
        # One listing of CRDs, five of other watched kinds, and two of PodGroups.
        listings = 8
        await second.wait_for_metric("elastic_operator_api_requests_total", listings, verb="list")
        known = await second.metric("elastic_operator_api_requests_total", verb="list")
        first.kill()
        last = (await ns.api.get(LEASES, ns.name, "elastic-operator"))["spec"]
        assert last["holderIdentity"] == holder_of(first)
        await second.wait_until_leading()
        taken = (await ns.api.get(LEASES, ns.name, "elastic-operator"))["spec"]
        assert taken["holderIdentity"] == holder_of(second)
        away = datetime.fromisoformat(taken["acquireTime"]) - datetime.fromisoformat(last["renewTime"])
        assert away <= timedelta(seconds=30), "the lease takes 10 s, and longer on a busy machine"
        await ns.kubectl("scale", "elasticjob/digits", "--replicas=2")
        await ns.wait_for_pods(2)
        assert await second.metric("elastic_operator_api_requests_total", verb="list") == known, (
            "the new leader lists objects again"
        )

        first.start()
        await first.wait_until_ready()
        assert await second.stop() == 0
        # A released lease is acquired before it expires.
        leases = await ns.wait_for(LEASES, lambda leases: holder(leases) != holder_of(second))
        assert holder(leases) in ("", holder_of(first))
        await first.wait_until_leading()
        await ns.kubectl("scale", "elasticjob/digits", "--replicas=3")
        await ns.wait_for_pods(3)


async def test_run_data_outlives_the_store_and_is_removed_with_the_job(
    ns: OperatorNamespace, operator: OperatorProcess, etcd: EtcdServer
) -> None:
    async def reported(rounds: int) -> Json:
        """Wait until the report has this number of rounds, and return the report."""

        def document(found: Objects) -> Json:
            return dict(json.loads(found["digits-report"]["data"]["report.json"])) if "digits-report" in found else {}

        return document(await ns.wait_for(CONFIG_MAPS, lambda found: len(document(found).get("rounds", ())) == rounds))

    job = await ns.apply(replicas=1, etcd={"endpoint": etcd.endpoint})
    keys = run_keys(job)
    created = datetime.fromisoformat(job["metadata"]["creationTimestamp"]).timestamp()
    async with etcd.connected() as store:
        (first,) = await ns.wait_for_pods(1)
        past = PastRound(number=1, began=created, nodes=1, cause="one node joined")
        trained = TimeBreakdown(until=created, seconds={RunState.TRAINING: 0.0}, nodes_joined=1)
        await store.put(keys.time_breakdown, encode(trained))
        await store.put(keys.history, encode(HistoryRecord(created=created, rounds=(past,))))
        await ns.report_round(store, job, first)
        await ns.wait_for_job(lambda status: status.get("round") == 1)

        await ns.change(suspend=True)
        resting = await ns.wait_for_job(lambda status: holds(status, "Suspended"))
        await wait_until_deleted(store, keys)
        kept = await reported(1)
        assert (kept["job"]["state"], kept["rounds"][0]["cause"]) == ("Suspended", "one node joined")
        assert kept["timeBreakdown"] == resting["status"]["timeBreakdown"]

        await ns.change(suspend=False)
        (second,) = await ns.wait_for_pods(1)
        pods = await ns.wait_for(PODS, lambda found: second in found)
        environment = {entry["name"]: entry.get("value") for entry in pods[second]["spec"]["containers"][0]["env"]}
        resume = decode(str(environment[Env.RESUME]).encode(), ResumeRecord)
        resumed = (await ns.wait_for_job(lambda status: "activeSince" in status))["status"]["timeBreakdown"]
        assert resume.time_breakdown is not None
        assert resumed["asOf"].startswith(
            f"{datetime.fromtimestamp(resume.time_breakdown.until, UTC):%Y-%m-%dT%H:%M:%S}"
        )
        assert resume.time_breakdown.seconds[RunState.SUSPENDED] == resumed["seconds"]["suspended"]

        await ns.report_running(second)
        later = PastRound(number=2, began=created + 1, nodes=1)
        await store.put(keys.history, encode(HistoryRecord(created=created, rounds=(later,))))
        await store.put(keys.state, encode(StateRecord(outcome=OutcomeRecord(state=OutcomeState.SUCCEEDED, round=2))))
        over = await ns.wait_for_job(lambda status: holds(status, "Succeeded"))
        kept = await reported(2)
        assert [round["number"] for round in kept["rounds"]] == [1, 2]
        assert (kept["job"]["state"], kept["outcome"]["state"]) == ("Succeeded", "succeeded")
        split = over["status"]["timeBreakdown"]
        assert kept["timeBreakdown"] == split
        assert sum(split["seconds"].values()) == pytest.approx(
            datetime.fromisoformat(split["asOf"]).timestamp() - created, abs=0.01
        )
        await ns.report_ended(second, 0)
        await wait_until_deleted(store, keys)
    assert "digits-report" in await ns.wait_for(CONFIG_MAPS, bool)
    await ns.kubectl("delete", "elasticjob", "digits")
    await ns.wait_for(CONFIG_MAPS, lambda found: "digits-report" not in found)
