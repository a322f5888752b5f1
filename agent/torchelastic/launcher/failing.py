"""The exception of a failed launch: torch's own, so that whoever catches that one catches ours."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from torchelastic.agent.server.api import ProcessFailure


def child_failed(name: str, failures: Mapping[int, ProcessFailure]) -> ChildFailedError:
    """The exception that tells of failed workers.

    Args:
        name: of what they ran.
        failures: by global rank, the root cause first.
    """
    from torch.distributed.elastic.multiprocessing import errors as torchs

    class RunFailedError(torchs.ChildFailedError):
        """Workers have failed. The first failure is the root cause, whatever the clocks of the nodes say."""

        def get_first_failure(self) -> tuple[int, torchs.ProcessFailure]:
            return next(iter(self.failures.items()))

    # torch reads what happened from files, and copies the first one on to whoever has launched the launcher.
    folder = Path(tempfile.mkdtemp(prefix="torchelastic-"))
    try:
        told = {
            rank: torchs.ProcessFailure(failure.local_rank, failure.pid, failure.exitcode, _told(folder, rank, failure))
            for rank, failure in failures.items()
        }
        error = RunFailedError(name, told)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(error, shutil.rmtree, folder, ignore_errors=True)
    return error


def _told(folder: Path, rank: int, failure: ProcessFailure) -> str:
    path = folder / f"{rank}.json"
    path.write_text(json.dumps({"message": failure.message, "timestamp": failure.timestamp}), encoding="utf-8")
    return str(path)
