"""``elastic-operator``: the operator's process.

Exit codes: 0 it was told to end, 1 it could not go on, 2 bad input.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_operator.errors import BadInput
from elastic_operator.kube.options import BAD_INPUT, parse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from elastic_operator.kube.api import Api
    from elastic_operator.kube.options import OperatorSettings


_TURN: Final = 0.0005
"""Seconds for which the watches' thread may keep the interpreter from the thread that acts. With the default, ten times
as long, it takes twice the time to make many pods while the watches tell of each."""

_YOUNG: Final = (20_000, 10, 10)
"""Thresholds of the garbage collector. Nearly all that the operator makes lives as long as a request, or as an object
of the cluster; with the usual thresholds a fifth of its time is spent looking through the latter for cycles."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator.

    Args:
        argv: the command line without the program's name; None for this process's own.

    Returns:
        The exit code.
    """
    settings = parse(argv, os.environ)
    # In a container nobody else ends process 1 on a signal, and what follows takes a while before it listens for one.
    signal.signal(signal.SIGTERM, _end_at_once)
    sys.setswitchinterval(_TURN)
    from elastic_operator.kube import log_lines  # what follows takes a moment to load; --help needn't wait for it

    log_lines.set_up(settings.log_format, settings.log_level)
    try:
        asyncio.run(_run(settings))
    except BadInput as error:
        sys.stderr.write(f"elastic-operator: {error}\n")
        return BAD_INPUT
    return 0


def _end_at_once(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


async def _run(settings: OperatorSettings) -> None:
    from elastic_operator.kube.process import Operator

    gc.freeze()  # the modules stay
    gc.set_threshold(*_YOUNG)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with _connection(settings) as api:
        await Operator(settings, api).run(stop)


@contextlib.asynccontextmanager
async def _connection(settings: OperatorSettings) -> AsyncGenerator[Api, None]:
    from elastic_operator.kube import kubeconfig
    from elastic_operator.kube.api import Api

    if settings.in_pod:
        unopened, source = await Api.in_cluster(), "the service account"
    else:
        files = kubeconfig.find(settings.kubeconfig, os.environ)
        unopened, source = await kubeconfig.connection(Api, files, settings.context), "the kubeconfig"
    async with kubeconfig.opened(unopened, source) as api:
        yield api


if __name__ == "__main__":
    sys.exit(main())
