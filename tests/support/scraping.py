"""The samples of a metrics page, read with Prometheus' own parser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agents import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values by name and sorted labels."""


class Page:
    """The samples of one scrape.

    Args:
        families: the parsed families; samples must be unique, and belong to one job or to no job.

    Attributes:
        samples: values by name and labels, without the labels that name the job.
        types: the types of the families.
        job: the namespace and the name of the job from the labels; None without such labels.
    """

    def __init__(self, families: Iterable[Metric]) -> None:
        self.samples: Samples = {}
        self.types: dict[str, str] = {}
        jobs = set()
        for family in families:
            assert family.name not in self.types, f"{family.name} is on the page twice"
            self.types[family.name] = family.type
            for sample in family.samples:
                labels = dict(sample.labels)
                namespace, name = labels.pop("job_namespace", None), labels.pop("elasticjob", None)
                jobs.add(None if namespace is None or name is None else (namespace, name))
                key = sample.name, tuple(sorted(labels.items()))
                assert key not in self.samples, f"{key} is on the page twice"
                self.samples[key] = sample.value
        assert len(jobs) <= 1, f"series are of different jobs, or some have no job: {jobs}"
        self.job = next(iter(jobs), None)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of one series; None if the page does not have it."""
        return self.samples.get((name, tuple(sorted(labels.items()))))

    def named(self, beginning: str) -> Samples:
        """Return all samples whose names begin with this text."""
        return {key: value for key, value in self.samples.items() if key[0].startswith(beginning)}


async def scraped(port: int, *, source: str = "127.0.0.1") -> Page:
    """Scrape a port on loopback once, from an address on loopback, and return the page."""
    return Page(text_string_to_metric_families(await scraped_text(port, source=source)))


async def scraped_text(port: int, *, source: str = "127.0.0.1") -> str:
    """Scrape a port on loopback once, from an address on loopback, and return the text."""
    async with (
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(TIMEOUT), connector=aiohttp.TCPConnector(local_addr=(source, 0))
        ) as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as response,
    ):
        text = await response.text()
        assert response.status == 200, text
        return text
