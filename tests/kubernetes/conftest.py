"""A real Kubernetes for the tests in this folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest_asyncio

from testbed.cache import Missing
from testbed.control_plane import ControlPlane
from tests.support.cluster_user import ROOT, User
from tests.support.collection import unavailable
from tests.support.operator_namespace import OperatorNamespace
from tests.support.watching_api import WatchingApi

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from testbed.cluster import Cluster
    from testbed.node import Node
    from tests.support.operator_process import OperatorProcess

DEFINITION = Path(__file__).parents[2] / "crds" / "elasticjob.yaml"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def control_plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A Kubernetes without nodes, shared by all tests; each test uses its own namespaces."""
    async with ControlPlane(tmp_path_factory.mktemp("control-plane")) as cluster:
        yield cluster
        cluster.check()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster_with_crd(control_plane: Cluster) -> AsyncIterator[Cluster]:
    """The shared Kubernetes without nodes, with the CRD of ElasticJobs."""
    await control_plane.apply_crd(DEFINITION.read_text())
    yield control_plane
    await control_plane.kubectl("delete", "--filename", str(DEFINITION))


@pytest_asyncio.fixture
async def namespace(control_plane: Cluster) -> AsyncIterator[str]:
    """A namespace for one test, in which pods can be created."""
    async with control_plane.namespace() as name:
        yield name


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def api(cluster_with_crd: Cluster) -> AsyncIterator[WatchingApi]:
    """An administrator's client of the shared Kubernetes without nodes."""
    async with await WatchingApi.from_kubeconfig(str(cluster_with_crd.kubeconfig)) as api:
        yield api


@pytest_asyncio.fixture(loop_scope="session")
async def ns(api: WatchingApi, cluster_with_crd: Cluster) -> AsyncIterator[OperatorNamespace]:
    """A namespace for one test, without an operator."""
    async with cluster_with_crd.namespace() as name:
        yield OperatorNamespace(api, cluster_with_crd, name)


@pytest_asyncio.fixture(loop_scope="session")
async def operator(ns: OperatorNamespace, tmp_path: Path) -> AsyncIterator[OperatorProcess]:
    """An operator for the test's namespace."""
    async with ns.operator(tmp_path) as operator:
        yield operator


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """A Kubernetes with one node, on which pods run; each test uses its own namespaces."""
    from testbed import images
    from testbed.node import Node

    async with contextlib.AsyncExitStack() as running:
        try:
            cluster = await running.enter_async_context(Node(tmp_path_factory.mktemp("node")))
        except Missing as why:  # known only after an attempt to start the node
            unavailable(why)
        for name, tag in images.IMAGES.items():
            await cluster.load_image(tag, images.archive(name))
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def installed(node: Node) -> AsyncIterator[Node]:
    """The Kubernetes with one node, with the operator installed as in the README."""
    release = ("elastic-operator", "--namespace", "elastic-system")
    await node.run("helm", "install", *release, str(ROOT / "charts"), "--create-namespace", "--wait", timeout=180)
    yield node
    await node.run("helm", "uninstall", *release, "--wait", timeout=120)
    await node.kubectl("delete", "crd", "elasticjobs.elastic.pytorch.org", "--ignore-not-found")


@pytest_asyncio.fixture(loop_scope="session")
async def user(installed: Node) -> AsyncIterator[User]:
    """A user with a namespace that admits only restricted pods."""
    async with installed.namespace(**{"pod-security.kubernetes.io/enforce": "restricted"}) as namespace:
        yield User(installed, namespace)
