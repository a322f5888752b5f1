"""What a forked worker does: become the process that would have been started by hand, and run the user's program."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torchelastic.progress  # noqa: F401 - a signal handler may need it while the program imports it
from torchelastic.agent import error_file, exec_child, run_program
from torchelastic.agent.late_imports import Teller
from torchelastic.agent.late_settings import LateSettings
from torchelastic.agent.process_table import TREE_MARK
from torchelastic.agent.title import set_mark, set_title
from torchelastic.metrics import worker as worker_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchelastic.agent.import_environment import ImportEnvironment


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """A worker.

    Attributes:
        kind: script or module.
        argv: the script or module, and its arguments.
        environment: its whole environment.
        imports: what was read of the environment that it was forked in.
        tell: where it tells of imports that come late.
    """

    kind: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    imports: ImportEnvironment
    tell: str

    def play(self) -> None:
        """Run the program; its end is the end of the process, as the interpreter ends it."""
        first = run_program.search_path(self.kind, self.argv[0])
        if self.imports.must_be_executed(self.environment) or run_program.hides_imported_modules(first):
            exec_child.become(*exec_child.python_program(self.kind, self.argv, self.environment))
        _be_fresh(self.imports.completed(self.environment))
        module = ["-m"] if self.kind == "module" else []
        set_title([sys.executable, *module, *self.argv])
        set_mark(self.environment[TREE_MARK])
        Teller(self.tell).watch()
        worker_metrics.attach()
        LateSettings(self.imports.at_start, self.imports.read, _tell_of_late_setting).watch()
        try:
            run_program.run(self.kind, self.argv)
        except SystemExit:
            raise
        except BaseException as error:
            error.__traceback__ = run_program.of_the_program(error.__traceback__)
            error_file.write(error)
            sys.excepthook(type(error), error, error.__traceback__)
            sys.excepthook = _nothing  # told already, and without the frames of ours that are added from here on
            raise


class _QuietEnd:
    """Silences standard error when the interpreter is all but gone, and all that the program made is destroyed.

    What was imported before the fork is not taken apart at the end: to do so would copy every page of it, and take
    longer than all the rest. Libraries that count what is left then complain, without a reason.
    """

    def __init__(self) -> None:
        self._steps = (os.open, os.devnull, os.O_WRONLY, os.dup2)  # names are no longer known then

    def __del__(self) -> None:
        open_, nowhere, mode, dup2 = self._steps
        dup2(open_(nowhere, mode), 2)


def _tell_of_late_setting(name: str, module: str) -> None:
    text = (
        f"torchelastic: {name} is set too late: {module} was imported before the program began. Set it where "
        "torchelastic-run is started, or start with --start-method exec.\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _nothing(*_: object) -> None:
    pass


def _be_fresh(environment: Mapping[str, str]) -> None:
    """Shed what a process that was just started would not have."""
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A new interpreter draws these from the system; a forked one would have the same in all ranks.
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # that of the CPU: those of devices begin with the same seed in every process
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    sys._torchelastic_quiet_end = _QuietEnd()  # type: ignore[attr-defined]  # noqa: SLF001 - the module cleared last
    # Progress is to be seen while it is made; a file or pipe would get it in blocks.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
