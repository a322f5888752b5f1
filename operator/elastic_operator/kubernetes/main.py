"""The command ``elastic-operator``. Exit codes: 0 after SIGTERM, 1 after an unexpected error, 2 for bad input."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_operator.errors import BadInput
from elastic_operator.kubernetes.options import BAD_INPUT, parse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from elastic_operator.kubernetes.client import Api
    from elastic_operator.kubernetes.options import OperatorSettings


_SWITCH_INTERVAL: Final = 0.0005
"""Seconds after which the watches' thread gives way. With the default, ten times as long, creating many pods takes
twice the time while the watches report each of them."""

_GC_THRESHOLDS: Final = (20_000, 10, 10)
"""Most objects live as long as a request, or as an object of the cluster; with the default thresholds a fifth of the
time is spent looking for cycles in the latter."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator; return the exit code."""
    settings = parse(argv, os.environ)
    # Process 1 ignores signals without a handler, and the imports below take a while.
    signal.signal(signal.SIGTERM, _exit)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    from elastic_operator.kubernetes import log_lines  # slow to import; --help need not wait

    log_lines.set_up(settings.log_format, settings.log_level)
    try:
        asyncio.run(_run(settings))
    except BadInput as error:
        sys.stderr.write(f"elastic-operator: {error}\n")
        return BAD_INPUT
    return 0


def _exit(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


async def _run(settings: OperatorSettings) -> None:
    from elastic_operator.kubernetes.manager import Manager

    gc.freeze()  # the modules stay
    gc.set_threshold(*_GC_THRESHOLDS)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with _connection(settings) as api:
        await Manager(settings, api).run(stop)


@contextlib.asynccontextmanager
async def _connection(settings: OperatorSettings) -> AsyncGenerator[Api, None]:
    from elastic_operator.kubernetes import kubeconfig
    from elastic_operator.kubernetes.client import Api

    if settings.in_pod:
        unopened, source = await Api.in_cluster(), "the service account"
    else:
        files = kubeconfig.find(settings.kubeconfig, os.environ)
        unopened, source = await kubeconfig.connection(Api, files, settings.context), "the kubeconfig"
    async with kubeconfig.opened(unopened, source) as api:
        yield api


if __name__ == "__main__":
    sys.exit(main())
