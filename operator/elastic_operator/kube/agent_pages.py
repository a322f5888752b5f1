"""What the agents of the jobs on a cluster tell under /metrics, asked for through the API server's pod proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from elastic_operator.errors import ClusterError
from elastic_operator.kube.api_error import ApiError
from elastic_operator.kube.jobs import ClusterJobs
from elastic_operator.kube.snapshot import snapshot_of
from elastic_operator.names import LABEL_JOB
from elastic_operator.showing.asking import LARGEST_PAGE, NotAllowed, ask, ask_leaders
from elastic_operator.showing.shown import Shown
from elastic_operator.unchecked import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_operator.kube.user_api import UserApi
    from elastic_operator.showing.agent_page import Page
    from elastic_operator.showing.asking import Fetch
    from elastic_operator.showing.shown import ShownPod
    from elastic_operator.spec import Json


class ClusterPages:
    """Reads jobs on a cluster with the pages of their agents.

    Args:
        api: the connection, open.
        all_namespaces: whether the jobs of all namespaces are meant.
    """

    def __init__(self, api: UserApi, *, all_namespaces: bool = False) -> None:
        self._api = api
        self._everywhere = all_namespaces

    async def job(self, name: str) -> tuple[Shown, Sequence[Page], Sequence[str]]:
        """A job, the pages of its agents, and what else is to be said.

        Raises:
            NotFound: there is no such job.
            ElasticJobError: it cannot be read.
        """
        notes: list[str] = []
        jobs = ClusterJobs(self._api, notes.append)
        job = await jobs.object(name)
        shown = Shown.of(snapshot_of(job, await jobs.workers(name)))
        hidden = [pod for pod in shown.living_pods if pod.ready and not pod.metrics_url]
        if hidden:
            notes.append(f"{hidden[0].name} does not say yet on which port its metrics are")
        pages, missing = await ask(shown.pods, self._fetch_in(self._api.namespace))
        return shown, pages, [*notes, *missing]

    async def jobs(self) -> list[tuple[Shown, Sequence[Page]]]:
        """All jobs of the namespace, or of all, each with the page of its leader.

        Raises:
            ElasticJobError: they cannot be read.
        """
        jobs = ClusterJobs(self._api, lambda _: None)
        objects = await jobs.objects(all_namespaces=self._everywhere)
        pods: dict[tuple[str, str], list[Json]] = {}
        for pod in await jobs.workers(all_namespaces=self._everywhere):
            key = text(pod, "metadata", "namespace"), text(pod, "metadata", "labels", LABEL_JOB)
            pods.setdefault(key, []).append(pod)
        places = [(each["metadata"]["namespace"], each["metadata"]["name"]) for each in objects]
        found = [Shown.of(snapshot_of(job, pods.get(place, ()))) for job, place in zip(objects, places, strict=True)]
        pages = await ask_leaders(
            [(shown.pods, self._fetch_in(namespace)) for shown, (namespace, _) in zip(found, places, strict=True)]
        )
        return list(zip(found, pages, strict=True))

    def _fetch_in(self, namespace: str) -> Fetch:
        async def fetch(pod: ShownPod) -> str:
            try:
                address = urlsplit(pod.metrics_url or "")
                port = address.port
            except ValueError as error:
                raise ClusterError(f"{pod.metrics_url} is no address of an agent ({error})") from None
            try:
                page = await self._api.from_pod(namespace, pod.name, port or 0, address.path, most=LARGEST_PAGE)
            except ApiError as error:
                if error.status in (401, 403):
                    raise NotAllowed(
                        f"what the agents tell may not be read ({error.words}); it takes the right to get pods/proxy, "
                        "or the pod itself refuses"
                    ) from None
                raise ClusterError(f"its agent does not answer ({error.words})") from None
            return page.decode(errors="replace")

        return fetch
