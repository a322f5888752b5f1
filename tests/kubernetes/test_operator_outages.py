"""The operator without the CRD, the API server or a permission, and after missed deletions."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from elastic_operator.api.constants import worker_selector
from elastic_operator.kubernetes.client import PODS
from testbed.control_plane import ControlPlane
from tests.support.operator_namespace import Json, OperatorNamespace, conditions, live, uids
from tests.support.operator_process import OperatorProcess
from tests.support.watching_api import WatchingApi
from torchelastic.store.api import StoreSettings
from torchelastic.store.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.etcd import EtcdServer

pytestmark = [pytest.mark.control_plane, pytest.mark.asyncio(loop_scope="session")]

_JOBS = "elasticjobs.elastic.pytorch.org"
RIGHTS = {
    "looks": (
        "--verb=list,watch",
        f"--resource={_JOBS},pods,services,deployments.apps,poddisruptionbudgets.policy,networkpolicies.networking.k8s.io",
    ),
    "tells": ("--verb=create,get,update,patch", f"--resource={_JOBS}/status,{_JOBS}/scale,events,secrets"),
    "creates": ("--verb=create", "--resource=pods,networkpolicies.networking.k8s.io"),
}
"""Roles with some permissions of an operator, as arguments of ``kubectl create role``."""

DEFINITION = str(Path(__file__).parents[2] / "crds" / "elasticjob.yaml")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def own_control_plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ControlPlane]:
    """A control plane without the CRD; a test may kill parts of the control plane."""
    async with ControlPlane(tmp_path_factory.mktemp("own-plane")) as plane:
        yield plane


@pytest_asyncio.fixture(loop_scope="session")
async def ns(own_control_plane: ControlPlane) -> AsyncIterator[OperatorNamespace]:
    async with (
        await WatchingApi.from_kubeconfig(str(own_control_plane.kubeconfig)) as api,
        own_control_plane.namespace() as namespace,
    ):
        yield OperatorNamespace(api, own_control_plane, namespace)


@pytest_asyncio.fixture(loop_scope="session")
async def with_crd(own_control_plane: ControlPlane) -> AsyncIterator[None]:
    """Create the CRD, and delete it after the test."""
    await create_crd(own_control_plane)
    yield
    await own_control_plane.kubectl("delete", "--filename", DEFINITION)


async def create_crd(plane: ControlPlane) -> None:
    await plane.apply_crd(Path(DEFINITION).read_text())


def waits_for(status: Json) -> str:
    """Return the message of a job's condition Waiting, or an empty string without this condition."""
    return str(conditions(status).get("Waiting", {}).get("message", ""))


def an_operator(plane: ControlPlane, folder: Path, *, wait: bool = True) -> OperatorProcess:
    """Return an operator for the whole cluster; all tests use the same replica name, so they share the lease."""
    return OperatorProcess(
        folder, plane.kubeconfig, "--lease-namespace=default", wait=wait, environ={"POD_NAME": "operator-0"}
    )


async def test_a_missing_crd_is_reported_and_work_starts_when_it_exists_again(
    own_control_plane: ControlPlane, ns: OperatorNamespace, tmp_path: Path
) -> None:
    async with an_operator(own_control_plane, tmp_path, wait=False) as operator:
        await operator.wait_for_log("this cluster does not know the ElasticJob: install the definition")
        await operator.wait_for_pages(lambda codes: codes == {"/healthz": 200, "/readyz": 503}, "/healthz", "/readyz")
        await create_crd(own_control_plane)
        await operator.wait_until_ready()
        await ns.apply(replicas=1)
        await ns.wait_for_pods(1)

        await own_control_plane.kubectl("delete", "--filename", DEFINITION)
        await operator.wait_for_log("the watches have ended")
        await create_crd(own_control_plane)
        await ns.apply("again", replicas=1)
        await ns.wait_for_pods(1, "again")
        assert "Traceback" not in operator.log
        assert operator.log.count("install the definition") < 5, "the message is logged with every attempt"
    await own_control_plane.kubectl("delete", "--filename", DEFINITION)


@pytest.mark.usefixtures("with_crd")
async def test_the_operator_survives_an_api_server_outage_and_notices_missed_deletions(
    own_control_plane: ControlPlane, ns: OperatorNamespace, tmp_path: Path
) -> None:
    async with an_operator(own_control_plane, tmp_path) as operator:
        await ns.apply(replicas=2)
        before = await ns.wait_for_pods(2)
        victim = min(before)
        server = own_control_plane.daemons["kube-apiserver"]
        server.kill()
        async with contextlib.AsyncExitStack() as stack:
            store = await connect(StoreSettings(endpoints=(own_control_plane.etcd_endpoint,)))
            stack.push_async_callback(store.close)
            await store.delete_prefix(f"/registry/pods/{ns.name}/{victim}")
        server.start()

        # No watch has reported the deletion, so the new pod has the same name.
        lost = before[victim]["metadata"]["uid"]
        after = await ns.wait_for(
            PODS,
            lambda pods: len(live(pods)) == 2 and lost not in uids(pods),
            labels=worker_selector("digits"),
        )
        assert uids(after) & uids(before) == uids(before) - {lost}
        await operator.wait_for_pages(lambda codes: codes == {"/healthz": 200, "/readyz": 200}, "/healthz", "/readyz")
        assert "Traceback" not in operator.log


@pytest.mark.usefixtures("with_crd")
async def test_a_namespace_without_permissions_blocks_no_other(
    own_control_plane: ControlPlane, ns: OperatorNamespace, tmp_path: Path
) -> None:
    async with own_control_plane.namespace() as closed:
        other = OperatorNamespace(ns.api, own_control_plane, closed)
        await ns.kubectl("create", "serviceaccount", "operator")
        account = f"--serviceaccount={ns.name}:operator"
        grant = ("create", "rolebinding", "operator", "--clusterrole=cluster-admin", account)
        await ns.kubectl(*grant)
        kubeconfig = await own_control_plane.kubeconfig_for(ns.name, "operator")
        flags = (f"--namespace={closed}", f"--namespace={ns.name}", "--no-leader-elect")
        async with OperatorProcess(tmp_path, kubeconfig, *flags) as operator:
            await operator.wait_for_log(f"the namespace {closed} cannot be watched", "remove it from --namespace")
            await ns.apply(replicas=1)
            await ns.wait_for_pods(1)

            await other.kubectl(*grant)
            await operator.wait_for_log(f"the namespace {closed} can be watched now")
            await other.apply(replicas=1)
            await other.wait_for_pods(1)
            await ns.change(replicas=2)
            await ns.wait_for_pods(2)
            await operator.wait_for_pages(lambda codes: codes == {"/readyz": 200}, "/readyz")
            assert operator.log.count("cannot be watched") == 1
            assert "Traceback" not in operator.log


@pytest.mark.usefixtures("with_crd")
async def test_a_permission_that_is_revoked_and_restored_is_reported_and_used(
    own_control_plane: ControlPlane, ns: OperatorNamespace, etcd: EtcdServer, tmp_path: Path
) -> None:
    await ns.kubectl("create", "serviceaccount", "operator")
    account = f"--serviceaccount={ns.name}:operator"
    for role, rights in RIGHTS.items():
        await ns.kubectl("create", "role", role, *rights)
        await ns.kubectl("create", "rolebinding", role, f"--role={role}", account)
    kubeconfig = await own_control_plane.kubeconfig_for(ns.name, "operator")
    flags = (f"--namespace={ns.name}", "--no-leader-elect")
    async with OperatorProcess(tmp_path, kubeconfig, *flags) as operator:
        await ns.apply(replicas=1, etcd={"endpoint": etcd.endpoint})
        first = await ns.wait_for_pods(1)
        await ns.kubectl("delete", "rolebinding", "creates")
        await ns.change(replicas=2)
        await ns.wait_for_job(lambda status: 'cannot create resource "pods"' in waits_for(status))
        await ns.wait_for_event(
            "ResourcesBlocked", 'cannot create resource "pods"', "grant the operator its permissions"
        )
        assert uids(await ns.wait_for_pods(1)) == uids(first), "existing objects are changed"
        assert await operator.metric("elastic_operator_api_requests_total", verb="post", code="403") < 6, (
            "the operator retries in a hot loop"
        )

        await ns.kubectl("create", "rolebinding", "creates", "--role=creates", account)
        await ns.wait_for_pods(2)
        await ns.wait_for_job(lambda status: "cannot create" not in waits_for(status))
        assert "Traceback" not in operator.log
