"""``torchelastic-run``: the agent's command, a drop-in for torchrun that needs no port opened by hand and no wait.

The order matters: the agent starts its fork server, which imports torch, before it imports anything heavy itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, NoReturn

from torchelastic.arguments import parse
from torchelastic.contract import (
    Env,
    ExitCode,
    TerminationMessage,
    encode_termination_message,
)
from torchelastic.errors import SettingsError, StartError
from torchelastic.output import TIME_FORMAT, log_format

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torchelastic.agent.ending import Ending
    from torchelastic.agent.workers import Workers
    from torchelastic.metrics.agent import AgentMetrics
    from torchelastic.metrics.of_workers import WorkerMetrics
    from torchelastic.settings import AgentSettings

CHECK_FLAG = "--check"

logger = logging.getLogger("torchelastic")


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent; with ``--check`` as the first argument, only say whether the rest of the line can be honoured.

    Args:
        argv: the arguments; those of the process where None.

    Returns:
        The exit code, see :class:`~torchelastic.contract.ExitCode`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    check = arguments[:1] == [CHECK_FLAG]
    if not check:
        _open_standard_streams()
        signal.signal(signal.SIGTERM, _leave)
    try:
        settings = parse(arguments[1:] if check else arguments, os.environ)
    except SettingsError as error:
        print(f"torchelastic-run: {error}", file=sys.stderr)  # noqa: T201 - the user's answer
        _write_termination_message(
            _log_path(os.environ.get(Env.TERMINATION_LOG)), TerminationMessage(reason="BadInput", message=str(error))
        )
        return ExitCode.BAD_INPUT
    if check:
        return ExitCode.SUCCEEDED
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=log_format(settings.node_name),
        datefmt=TIME_FORMAT,
    )
    try:
        ending = asyncio.run(_run(settings))
    except KeyboardInterrupt:  # before the agent listened to signals
        return ExitCode.INTERRUPTED
    except StartError as error:  # of this node alone: no word on the run
        print(f"torchelastic-run: {error}", file=sys.stderr)  # noqa: T201
        return ExitCode.FAILED
    with suppress(OSError):  # nobody reads it; the exit code says the same
        if ending.code in (ExitCode.FAILED, ExitCode.STORE, ExitCode.BROKEN):
            print(f"torchelastic-run: the run has failed: {ending.message.message}", file=sys.stderr)  # noqa: T201
        elif ending.code in (ExitCode.BAD_INPUT, ExitCode.NO_PORT):
            print(f"torchelastic-run: {ending.message.message}", file=sys.stderr)  # noqa: T201
    return ending.code


def _open_standard_streams() -> None:
    """See that all three are open: what is opened next would take the number of one that is not, and its output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


async def _run(settings: AgentSettings) -> Ending:
    async with AsyncExitStack() as stack:
        ending = await _take_part(stack, settings)
        # Now, since what workers have printed may be waited for, where somebody reads it slowly.
        _write_termination_message(settings.termination_log, ending.message)
    return ending


async def _take_part(stack: AsyncExitStack, settings: AgentSettings) -> Ending:
    from torchelastic.agent.workers import workers_of

    try:
        workers = await stack.enter_async_context(workers_of(settings))
        # What follows is imported while the fork server imports torch.
        from torchelastic.agent.agent import Agent
        from torchelastic.metrics.agent import AgentMetrics

        metrics = AgentMetrics(job=settings.job)
        port = (
            0 if workers.metrics is None else await _serve_metrics(stack, metrics, settings, workers, workers.metrics)
        )
    except SettingsError as error:
        from torchelastic.agent.ending import Ending

        return Ending.because(ExitCode.BAD_INPUT, "BadInput", f"{error}")
    return await Agent(settings, metrics).run(workers, port)


async def _serve_metrics(
    stack: AsyncExitStack, metrics: AgentMetrics, settings: AgentSettings, workers: Workers, measured: WorkerMetrics
) -> int:
    """Serve them as long as the stack lasts; returns the port."""
    from prometheus_client import ProcessCollector

    from torchelastic.agent.resident_memory import ResidentMemory
    from torchelastic.metrics.gpus import Gpus
    from torchelastic.metrics.server import MetricsServer

    port = settings.metrics_port or 0
    of_machine = (ResidentMemory(lambda: workers.running_pids), ProcessCollector(registry=None), Gpus())
    registry = metrics.registry(measured, *of_machine)
    server = await stack.enter_async_context(MetricsServer(registry, port, host=settings.address))
    if port == 0:  # nobody else can say which one it is
        logger.info("serving /metrics on port %d", server.port)
    return server.port


def _leave(*_: object) -> NoReturn:
    """Go before the agent listens to signals: as the first process of a container it would not even be ended by one."""
    raise SystemExit(ExitCode.LEFT)


def _log_path(text: str | None) -> Path | None:
    from pathlib import Path

    return Path(text) if text else None


def _write_termination_message(path: Path | None, message: TerminationMessage) -> None:
    if path is None:
        return
    try:
        path.write_bytes(encode_termination_message(message))
    except OSError as error:
        logger.warning("could not write the termination message to %s: %s", path, error.strerror)


if __name__ == "__main__":
    sys.exit(main())
