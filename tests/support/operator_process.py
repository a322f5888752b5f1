"""The real ``elastic-operator`` as a process that tests start, query, stop and kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from elastic_operator.local.processes import free_ports
from testbed.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

TIMEOUT = 120.0
"""The limit of each wait in seconds, even on a busy machine."""

_POLL = 0.05
"""Seconds between two requests; there is no event to wait for."""

EXECUTABLE = Path(sys.executable).with_name("elastic-operator")


class OperatorProcess(Daemon):
    """A replica of the operator; it runs within ``async with``.

    Args:
        folder: the folder of its log.
        kubeconfig: the kubeconfig of the replica.
        args: more flags.
        name: the name of its log.
        wait: whether to begin the block only when the replica is ready.
        environ: more variables.
    """

    def __init__(
        self,
        folder: Path,
        kubeconfig: Path,
        *args: str,
        name: str = "operator",
        wait: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "POD_"))}
        command = [str(EXECUTABLE), f"--kubeconfig={kubeconfig}", "--etcd-endpoints=127.0.0.0/8", *args]
        super().__init__(command, folder=folder, environ={**inherited, **(environ or {})}, name=name)
        self._command = command
        self._wait = wait
        self._port = 0

    async def __aenter__(self) -> Self:
        self.start()
        if self._wait:
            try:
                await self.wait_until_ready()
            except BaseException:
                self.kill()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        """The address of its HTTP server: host:port."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the operator, also after it was stopped or killed, on a free port."""
        (self._port,) = free_ports(1)
        self.argv = [*self._command, f"--listen={self.address}"]
        super().start()

    async def stop(self) -> int:
        """Stop the operator with SIGTERM, and return its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        try:
            return await asyncio.to_thread(self.process.wait, TIMEOUT)
        finally:
            self.kill()

    async def wait_until_ready(self) -> None:
        """Wait until /readyz reports that the operator is ready."""
        await self.wait_for_pages(lambda answers: answers.get("/readyz") == 200, "/readyz")

    async def wait_until_leading(self) -> None:
        """Wait until this replica is the leader."""
        await self._poll(self.is_leading)

    async def is_leading(self) -> bool:
        """Return whether this replica is the leader."""
        return await self.metric("elastic_operator_leader") == 1

    async def wait_for_pages(self, condition: Callable[[dict[str, int]], bool], *paths: str) -> None:
        """Wait until the statuses of these pages meet a condition; 0 means no answer."""

        async def holds() -> bool:
            return condition({path: (await self.get(path))[0] for path in paths})

        await self._poll(holds)

    async def wait_for_metric(self, name: str, at_least: float, **labels: str) -> None:
        """Wait until a metric has reached a value."""

        async def holds() -> bool:
            return await self.metric(name, **labels) >= at_least

        await self._poll(holds)

    async def wait_for_log(self, *words: str) -> None:
        """Wait until the log contains all of these texts."""

        async def holds() -> bool:
            return all(word in self.log for word in words)

        await self._poll(holds)

    async def get(self, path: str) -> tuple[int, str]:
        """Send a GET, and return the status and the text; the status is 0 without an answer."""
        limit = aiohttp.ClientTimeout(total=5)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.get(f"http://{self.address}{path}") as response,
            ):
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels, or 0 without samples."""
        _, text = await self.get("/metrics")
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def _poll(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while True:
                if await condition():
                    return
                self.check()
                await asyncio.sleep(_POLL)
