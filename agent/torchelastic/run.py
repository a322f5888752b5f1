"""``torchelastic-run``: the agent's command, a drop-in replacement for torchrun.

The agent first starts its fork server, which imports torch. The agent's own large imports run at the same time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import threading
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from torchelastic.agent.failures import ExitStatus
from torchelastic.config import flags, parsers
from torchelastic.config.parse import backend_of, count_workers, endpoint_of, make_specs, parse
from torchelastic.config.parsers import RawValue
from torchelastic.config.settings import ProgramKind
from torchelastic.connections import raise_descriptor_limit
from torchelastic.errors import SettingsError, StartError
from torchelastic.protocol.log_format import DEFAULT_ROLE, TIME_FORMAT, log_format
from torchelastic.protocol.pod import CALLS_MODULE, Env, ExitCode, TerminationMessage, encode_termination_message
from torchelastic.training.error_file import record_failure

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torchelastic.agent.workers.pool import Workers
    from torchelastic.config.settings import AgentSettings
    from torchelastic.launcher.api import LaunchConfig
    from torchelastic.metrics.agent import AgentMetrics
    from torchelastic.metrics.worker_collector import WorkerCollector

CHECK_FLAG = "--check"

_TORCH_DEFAULTS: Final = {
    "nnodes": "1:1",
    "nproc-per-node": "1",
    "max-restarts": 0,
    "monitor-interval": 0.1,
    "role": DEFAULT_ROLE,
    "redirects": "0",
    "tee": "0",
    "signals-to-handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
}
"""The values of torchrun's parser for flags that are not set, where they are also this agent's defaults."""

logger = logging.getLogger("torchelastic")


def command() -> int:
    """Run the command ``torchelastic-run``, in a process without other children, and return its exit code."""
    signal.signal(signal.SIGTERM, _leave)
    raise_descriptor_limit()
    return _main(sys.argv[1:], owns_process=True)


def main(args: Sequence[str] | None = None) -> None:
    """Run an agent in a program; with ``--check`` as the first argument, only check the other arguments.

    The calling program keeps its children and its signal handlers. While the agent runs, it handles the signals, if the
    caller is the main thread.

    Args:
        args: the arguments; None for the arguments of this process.

    Raises:
        ChildFailedError: the run has failed; torch's exception, with the root cause as its first failure.
        SystemExit: an argument is invalid, this node cannot join the run, or it has left the run on a signal.
    """
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        if code := _main(sys.argv[1:] if args is None else args, owns_process=False):
            raise SystemExit(code)
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def get_args_parser() -> argparse.ArgumentParser:
    """Return a parser of the command line, for programs that use torchrun's."""
    return flags.argument_parser(_TORCH_DEFAULTS)


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments with torchrun's names of the attributes; None for the arguments of this process."""
    return get_args_parser().parse_args(args)


def run(args: argparse.Namespace) -> None:
    """Run an agent with the arguments that :func:`parse_args` has returned: see :func:`main`."""
    main(_command_line(args))


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Return the minimum and the maximum of ``--nnodes``; raise SettingsError if it is invalid."""
    size = parsers.nodes(RawValue("nnodes", nnodes))
    return size.min, size.max


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of workers of ``--nproc-per-node``; raise SettingsError if it is invalid."""
    return count_workers(RawValue("nproc_per_node", nproc_per_node), os.environ)


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, str, list[str]]:
    """Return the arguments of :func:`~torchelastic.launcher.launch_agent` for these arguments.

    Raises:
        SettingsError: an argument is invalid.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from torchelastic.agent.server.api import common_fields
    from torchelastic.launcher.api import LaunchConfig

    argv = _command_line(args)
    settings, line = parse(argv, os.environ), flags.read(argv, os.environ)
    program, rules, logs, backend = settings.program, settings.rendezvous, settings.logs, backend_of(line).text
    config = LaunchConfig(rules.size.min, rules.size.max, settings.workers)
    for part in (settings, program, rules, logs):
        vars(config).update(common_fields(LaunchConfig, part))
    config.logs_specs, config.redirects, config.tee = logs.specs or make_specs(DefaultLogsSpecs, logs), 0, 0
    config.local_addr = line.values.get("local-addr")
    config.signals_to_handle = ",".join(number.name for number in settings.signals)
    if "rdzv-conf" in line.raw:
        config.rdzv_configs = dict(flags.split_conf(line.raw["rdzv-conf"]))
    if settings.store is not None and (endpoint := endpoint_of(line, backend)) is not None:
        config.rdzv_backend, config.rdzv_endpoint = backend, endpoint.text
        config.rdzv_configs |= {"rank": settings.node_rank or 0} if backend == "static" else {}
    if settings.numa_binding:
        from torch.numa.binding import AffinityMode, NumaOptions

        config.numa_options = NumaOptions(AffinityMode(settings.numa_binding))
    start = {ProgramKind.SCRIPT: [sys.executable], ProgramKind.MODULE: [sys.executable, "-m"], ProgramKind.COMMAND: []}
    command, *rest = *start[program.kind], *program.argv
    return config, command, rest


def _command_line(args: argparse.Namespace) -> list[str]:
    """Return the command line with these arguments, except those that are not set: variables may set them."""
    unset = vars(parse_args(["-"]))
    given = {name: value for name, value in vars(args).items() if value not in (None, "", [], unset.get(name))}
    program = (given.pop("training_script", ""), *given.pop("training_script_args", ()))
    for name, value in given.items():
        if isinstance(value, list):  # the texts of a filter
            given[name] = ",".join(text.replace(",", ",,") for text in value)
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()] + [*program]


def _main(argv: Sequence[str], *, owns_process: bool) -> int:
    arguments = list(argv)
    _open_standard_streams()
    check = arguments[:1] == [CHECK_FLAG]
    try:
        settings = parse(arguments[1:] if check else arguments, os.environ)
    except SettingsError as error:
        print(f"torchelastic-run: {error}", file=sys.stderr)  # noqa: T201 - output for the user
        if path := os.environ.get(Env.TERMINATION_LOG):
            _write_termination_message(Path(path), ExitStatus.of_error(error).message)
        return ExitCode.BAD_INPUT
    if check:
        return ExitCode.SUCCEEDED
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        settings = dataclasses.replace(settings, signals=frozenset())
    log = log_format(settings.node_name)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=log, datefmt=TIME_FORMAT)
    try:
        ending = asyncio.run(_run(settings, owns_process=owns_process))
    except KeyboardInterrupt:  # before the agent handles signals
        return ExitCode.INTERRUPTED
    except StartError as error:  # only this node fails; the run may continue
        print(f"torchelastic-run: {error}", file=sys.stderr)  # noqa: T201
        return ExitCode.FAILED
    with suppress(OSError):  # stderr is closed; the exit code remains
        if ending.code in (ExitCode.FAILED, ExitCode.STORE_UNAVAILABLE, ExitCode.AGENT_ERROR):
            print(f"torchelastic-run: the run has failed: {ending.message.message}", file=sys.stderr)  # noqa: T201
        elif ending.code in (ExitCode.BAD_INPUT, ExitCode.NO_PORT):
            print(f"torchelastic-run: {ending.message.message}", file=sys.stderr)  # noqa: T201
    return ending.code


def _open_standard_streams() -> None:
    """Open closed standard streams as /dev/null; otherwise, the next opened file would receive their output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


async def _run(settings: AgentSettings, *, owns_process: bool) -> ExitStatus:
    async with AsyncExitStack() as stack:
        ending = await _participate(stack, settings, owns_process=owns_process)
        # Write it before the stack is closed: closing may wait for a slow reader of the workers' output.
        _write_termination_message(settings.termination_log, ending.message)
    return ending


async def _participate(stack: AsyncExitStack, settings: AgentSettings, *, owns_process: bool) -> ExitStatus:
    from torchelastic.agent.workers.pool import Workers

    service = None
    if settings.program.kind is ProgramKind.MODULE and settings.program.argv[0] == CALLS_MODULE:
        from torchelastic.launcher.pod import CallService

        service = CallService(settings)
        settings = service.settings
    output = None if service is None else service.output
    try:
        workers = await stack.enter_async_context(Workers(settings, owns_process=owns_process, output=output))
        # Import these modules while the fork server imports torch.
        from torchelastic.agent.agent import Agent
        from torchelastic.metrics.agent import AgentMetrics

        metrics = AgentMetrics(settings.role, job=settings.job)
        port = (
            0 if workers.metrics is None else await _serve_metrics(stack, metrics, settings, workers, workers.metrics)
        )
    except SettingsError as error:
        return ExitStatus.of_error(error)
    if service is not None:
        return await service.run(workers, metrics, port)
    agent = Agent(settings, metrics)
    ending = await agent.run(workers, port)
    if (failure := ending.message.failure) is not None and ending.code is ExitCode.FAILED:
        record_failure(failure.message, workers.error_files.get(failure.rank))
        if not owns_process:
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

            from torchelastic.agent.server.process_failures import process_failures

            raise ChildFailedError(settings.program.argv[0], process_failures(failure, agent, workers))
    return ending


async def _serve_metrics(
    stack: AsyncExitStack, metrics: AgentMetrics, settings: AgentSettings, workers: Workers, measured: WorkerCollector
) -> int:
    """Serve /metrics until the stack is closed; return the port."""
    from prometheus_client import ProcessCollector

    from torchelastic.agent.machine_metrics import Gpus, WorkerMemory
    from torchelastic.metrics.prometheus import serve_metrics

    port = settings.metrics_port or 0
    machine_metrics = (WorkerMemory(lambda: workers.running_pids), ProcessCollector(registry=None), Gpus())
    registry = metrics.page(measured, *machine_metrics)
    served_on = await stack.enter_async_context(serve_metrics(registry, port, settings.address))
    if port == 0:  # the user cannot know the port
        logger.info("serving /metrics on port %d", served_on)
    return served_on


def _leave(*_: object) -> NoReturn:
    """Exit on a signal that arrives before the agent handles signals; by default, PID 1 of a container ignores it."""
    raise SystemExit(ExitCode.LEFT)


def _write_termination_message(path: Path | None, message: TerminationMessage) -> None:
    if path is None:
        return
    try:
        path.write_bytes(encode_termination_message(message))
    except OSError as error:
        logger.warning("could not write the termination message to %s: %s", path, error.strerror)


if __name__ == "__main__":
    sys.exit(command())
