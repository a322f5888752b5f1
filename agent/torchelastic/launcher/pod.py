"""The agent of a pod that takes calls from a launcher: ``torchelastic-run -m torchelastic.launcher.pod [keep]``.

The agent joins the run of the pod's job when a launcher has connected and has sent a call. The launcher reaches it
through the API server, which executes :mod:`torchelastic.launcher.relay` in the container: only clients that may
execute commands in the pod can connect. Without ``keep``, the pod makes one call, and fails the job if the launcher
dies. With ``keep``, it makes one call after another, each as a run of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Final

from torchelastic.agent.agent import Agent
from torchelastic.agent.failures import ExitStatus
from torchelastic.agent.function_call import CALL_MODULE, write_call
from torchelastic.agent.signals import SignalReceived, Signals
from torchelastic.config.settings import LogSettings, Program, ProgramKind
from torchelastic.errors import SettingsError
from torchelastic.launcher.channel import Channel
from torchelastic.launcher.node import ChannelOutput, Inbox, env_file_variables, extract_code, greet, report
from torchelastic.launcher.relay import socket_path
from torchelastic.protocol.pod import LEAVING_SIGNALS, LEFT_CODES
from torchelastic.protocol.records import ResumeRecord

if TYPE_CHECKING:
    from torchelastic.agent.workers.pool import Workers
    from torchelastic.config.settings import AgentSettings
    from torchelastic.metrics.agent import AgentMetrics

_CONNECT_TIMEOUT: Final = 120.0
"""Seconds without a launcher after which the job fails; it may have died before it could connect."""

_PING_TIMEOUT: Final = 30.0
"""Seconds without a message of the launcher after which it counts as lost; it sends one every 5 s."""

_STOP_TIMEOUT: Final = 2.0
"""Seconds between SIGTERM and SIGKILL for the workers if the launcher stops or dies."""

_LOST: Final = "the launching program has ended, or the connection to it"

logger: Final = logging.getLogger(__name__)


class CallService:
    """Runs the calls of launchers on this pod.

    Args:
        settings: the settings of the pod's agent.

    Attributes:
        settings: the settings for the workers.
        output: takes the output of the workers.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._keeps = "keep" in settings.program.argv[1:]
        self.output = ChannelOutput()
        self.settings = dataclasses.replace(
            settings,
            program=Program(ProgramKind.MODULE, (CALL_MODULE,)),
            logs=LogSettings(prefix=True, log_line_prefix_template="${local_rank}"),
        )

    async def run(self, workers: Workers, metrics: AgentMetrics, metrics_port: int) -> ExitStatus:
        """Run one call, or with ``keep`` all calls, until a signal asks this pod to leave."""
        path = socket_path()
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{path}")
            path.chmod(0o600)
            listener.listen()
            listener.setblocking(False)
            while True:
                accepting = asyncio.get_running_loop().sock_accept(listener)
                try:
                    with Signals(lambda _: None, self.settings.signals) as signals:
                        connection, _ = await signals.run_until_first_signal(
                            asyncio.wait_for(accepting, None if self._keeps else _CONNECT_TIMEOUT)
                        )
                    connection.setblocking(True)
                    call = _Call(self, Channel(os.dup(connection.fileno()), connection.detach()))
                    ending = await call.run(workers, metrics, metrics_port, own_run=self._keeps)
                except TimeoutError:
                    return _failed("no launching program has connected")
                except SignalReceived:
                    return ExitStatus.because(LEAVING_SIGNALS[signals.number], "Left", f"left on {signals.number.name}")
                if not self._keeps or ending.code in LEFT_CODES:
                    return ending


class _Call:
    """One call of a launcher."""

    def __init__(self, service: CallService, channel: Channel) -> None:
        self._settings = service.settings
        self._channel = channel
        service.output.connect(channel)
        self._loop = asyncio.get_running_loop()
        self._agent: Agent | None = None
        self._lost = asyncio.Event()
        self._inbox = Inbox(channel, service.output, self._closed)

    async def run(self, workers: Workers, metrics: AgentMetrics, metrics_port: int, *, own_run: bool) -> ExitStatus:
        """Run the call, and report to the launcher until it closes the channel.

        Raises:
            SignalReceived: a signal asked this pod to leave after the call.
        """
        greet(self._channel)
        handler = _LogHandler(self._channel)
        logging.getLogger().addHandler(handler)
        watching = self._loop.create_task(self._watch())
        try:
            ending = await self._make_call(workers, metrics, metrics_port, own_run=own_run)
            with Signals(lambda _: None, self._settings.signals) as signals:
                await signals.run_until_first_signal(self._drain())
        finally:
            watching.cancel()
            logging.getLogger().removeHandler(handler)
            self._channel.close()
        return ending

    async def _make_call(
        self, workers: Workers, metrics: AgentMetrics, metrics_port: int, *, own_run: bool
    ) -> ExitStatus:
        settings, messages = self._settings, self._inbox.messages
        if (first := await messages.get()) is None or (call := await messages.get()) is None:
            return _failed(_LOST)
        opened, code = first
        try:
            variables = env_file_variables(opened["env_file"]) if opened["env_file"] else {}
            extract_code(code, workers.scratch)
            write_call(workers.scratch, call[1], {**variables, **opened["environment"]})
        except SettingsError as error:
            self._channel.send({"type": "refused", "message": f"{error}"})
            return ExitStatus.of_error(error)
        if self._lost.is_set():
            return _failed(_LOST)
        if own_run:
            run_id = f"{settings.rendezvous.run_id}-{opened['run_id']}"
            settings = dataclasses.replace(
                settings, rendezvous=dataclasses.replace(settings.rendezvous, run_id=run_id, resume=ResumeRecord())
            )
        agent = self._agent = Agent(settings, metrics)
        ending = await agent.run(workers, metrics_port)
        if self._lost.is_set():
            return _failed(_LOST)
        report(self._channel, agent, ending, workers.scratch)
        return ending

    async def _drain(self) -> None:
        """Wait until the launcher has read all, and closes the channel; then this pod may exit."""
        while not self._lost.is_set() and await self._inbox.messages.get() is not None:
            pass

    def _closed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lose)

    def _lose(self) -> None:
        self._lost.set()
        if self._agent is not None:
            self._agent.leave()
            self._loop.call_later(_STOP_TIMEOUT, self._agent.leave)

    async def _watch(self) -> None:
        while (left := self._inbox.last_message + _PING_TIMEOUT - time.monotonic()) > 0:
            await asyncio.sleep(left)
            if self._lost.is_set():
                return
        logger.warning("the launching program has sent nothing for %.0f s", _PING_TIMEOUT)
        self._inbox.messages.put_nowait(None)
        self._lose()


class _LogHandler(logging.Handler):
    """Sends the agent's own log to the launcher."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send({"type": "agent"}, f"{self.format(record)}\n".encode(errors="replace"))


def _failed(message: str) -> ExitStatus:
    """Return the status that fails the job at once, because a new pod would not help."""
    return ExitStatus.of_error(SettingsError(message))
