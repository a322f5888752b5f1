"""The real ``elastic-operator`` as a process that tests start, query, stop and kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from elastic_operator.local.etcd import free_ports
from elastic_operator.local.pdeathsig import with_pdeathsig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

PATIENCE = 120.0
"""The limit of each wait in seconds, even on a busy machine."""

_POLL = 0.05
"""Seconds between two requests; there is no event to wait for."""

EXECUTABLE = Path(sys.executable).with_name("elastic-operator")


class OperatorProcess:
    """One replica of the operator; within ``async with`` it runs, and is ready when the block begins.

    Args:
        folder: the folder of its log.
        kubeconfig: its access to the API server.
        args: more flags.
        name: the name of its log.
        wait: whether to wait until it is ready.
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
        self.log_file = folder / f"{name}.log"
        self._kubeconfig = kubeconfig
        self._args = args
        self._wait = wait
        self._environ = dict(environ or {})
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

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
    def log(self) -> str:
        """Its log."""
        return self.log_file.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._running().pid

    @property
    def address(self) -> str:
        """The address of its HTTP server: host:port."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it; it may have run before."""
        if self._process is not None:
            raise RuntimeError("this operator runs already")
        (self._port,) = free_ports(1)
        command: Sequence[str] = [
            str(EXECUTABLE),
            f"--kubeconfig={self._kubeconfig}",
            f"--listen=127.0.0.1:{self._port}",
            *self._args,
        ]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "POD_"))}
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                with_pdeathsig(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, **self._environ},
            )

    def kill(self) -> None:
        """End it with SIGKILL if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    async def stop(self) -> int:
        """End it with SIGTERM; returns its exit code."""
        process, self._process = self._running(), None
        process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(process.wait, PATIENCE)
        finally:
            process.kill()

    async def ended(self) -> int:
        """Wait until the process ends by itself; returns its exit code."""
        process = self._running()
        code = await asyncio.to_thread(process.wait, PATIENCE)
        self._process = None
        return code

    async def wait_until_ready(self) -> None:
        """Wait until /readyz reports that the operator is ready."""
        await self.wait_for_pages(lambda answers: answers.get("/readyz") == 200, "/readyz")

    async def wait_until_leading(self) -> None:
        """Wait until this replica is the leader."""
        await self._poll(self.is_leading)

    async def is_leading(self) -> bool:
        """Whether this replica is the leader."""
        return await self.metric("elastic_operator_leader") == 1

    async def wait_for_pages(self, condition: Callable[[dict[str, int]], bool], *paths: str) -> None:
        """Wait until these pages have these statuses; 0 means no answer."""

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
        """Send a GET; returns the status, 0 without an answer, and the text."""
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
        """The sum of the samples with this name and these labels; 0 without samples."""
        _, text = await self.get("/metrics")
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def _poll(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                if await condition():
                    return
                code = self._running().poll()
                assert code is None, f"the operator ended with {code}:\n{self.log}"
                await asyncio.sleep(_POLL)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("this operator does not run")
        return self._process
