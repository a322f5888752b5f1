"""A real Kubernetes for the tests in this folder, or clear words that there is none.

What the wanted tests need is made when they are collected, so that no test's time limit has to hold for it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.support.testbed import availability, user_cluster
from tests.support.testbed.availability import Bed
from tests.support.testbed.cache import Missing
from tests.support.testbed.control_plane import ControlPlane
from tests.support.testbed.user_cluster import UserCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.testbed.cluster import Cluster
    from tests.support.testbed.node import Node

DEFINITION = Path(__file__).parents[2] / "crds" / "elasticjob.yaml"

MISSING = pytest.StashKey[dict[Bed, Missing]]()
LEFT_OUT = pytest.StashKey[Counter[Bed]]()


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


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MISSING] = {}
    config.stash[LEFT_OUT] = Counter()


@pytest.hookimpl(trylast=True)  # after -k and -m: nothing is made for tests that are not wanted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.collectonly:
        return
    by_bed = {bed: [item for item in items if item.get_closest_marker(bed)] for bed in availability.BEDS}
    with _heard(config) as say:
        missing = availability.prepare({bed for bed, wanted in by_bed.items() if wanted}, say)
    config.stash[MISSING].update(missing)
    config.stash[LEFT_OUT].update({bed: len(by_bed[bed]) for bed in missing})
    left_out = [item for bed in missing for item in by_bed[bed]]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if missing := config.stash[MISSING]:
        terminalreporter.section("a real Kubernetes", red=True, bold=True)
        for line in availability.closing_words(missing, config.stash[LEFT_OUT]):
            terminalreporter.line(line, red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[MISSING] and availability.must_not_miss():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@contextlib.contextmanager
def _heard(config: pytest.Config) -> Iterator[Any]:
    """Let what takes minutes be told while it goes on; pytest keeps what is printed to itself."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        yield reporter.write_line if reporter else print
