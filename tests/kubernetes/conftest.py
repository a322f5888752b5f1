"""A real Kubernetes for the tests in this folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support.testbed import user_cluster
from tests.support.testbed.cache import Missing
from tests.support.testbed.collection import MISSING
from tests.support.testbed.control_plane import ControlPlane
from tests.support.testbed.user_cluster import UserCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.testbed.cluster import Cluster
    from tests.support.testbed.node import Node

DEFINITION = Path(__file__).parents[2] / "crds" / "elasticjob.yaml"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def control_plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A Kubernetes without nodes that all tests share: keep to namespaces of your own, and leave it running."""
    folder = tmp_path_factory.mktemp("control-plane")
    kubeconfig = user_cluster.named()
    async with UserCluster(folder, Path(kubeconfig)) if kubeconfig else ControlPlane(folder) as cluster:
        yield cluster
        cluster.check()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster_with_crd(control_plane: Cluster) -> AsyncIterator[Cluster]:
    """The same, where ElasticJobs are defined."""
    await control_plane.kubectl("apply", "--filename", str(DEFINITION))
    await control_plane.kubectl("wait", "--for=condition=Established", "--filename", str(DEFINITION))
    yield control_plane
    await control_plane.kubectl("delete", "--filename", str(DEFINITION))


@pytest_asyncio.fixture
async def namespace(control_plane: Cluster) -> AsyncIterator[str]:
    """A namespace of one test's own, in which pods can be made."""
    async with control_plane.namespace() as name:
        yield name


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def node(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> AsyncIterator[Node]:
    """A Kubernetes with one node, where pods run: keep to namespaces of your own, and leave it running."""
    from tests.support.testbed import images
    from tests.support.testbed.node import Node

    async with contextlib.AsyncExitStack() as running:
        try:
            cluster = await running.enter_async_context(Node(tmp_path_factory.mktemp("node")))
        except Missing as why:  # only now it is known; then each of its tests is told as skipped
            pytestconfig.stash[MISSING]["node"] = why
            pytest.skip(str(why))
        for archive in (archive for name in images.IMAGES for archive in images.archives(name)):
            await cluster.load_image(archive)
        yield cluster
