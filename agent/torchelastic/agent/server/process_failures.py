"""A run's failures as torch's objects."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from torchelastic.agent.agent import Agent
    from torchelastic.agent.workers.pool import Workers
    from torchelastic.protocol.records import FailureRecord


def process_failures(root: FailureRecord, agent: Agent, workers: Workers) -> dict[int, ProcessFailure]:
    """Return the root cause of a failed run and the failures of an agent's workers, by rank.

    Each failure has an error file, because ``@record`` copies the file of the first failure. If the worker has not
    written a file, or is on another node, the file contains the message of its failure.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    folder = Path(tempfile.mkdtemp(prefix="torchelastic_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    now = int(time.time())
    failures: dict[int, ProcessFailure] = {}
    for each in (root, *(other for other in agent.failures if other.rank != root.rank)):
        file, written, is_own = folder / f"{each.rank}.json", workers.error_files.get(each.rank), agent.is_own(each)
        if is_own and written is not None and written.exists():
            if written.is_relative_to(workers.scratch):  # the file is removed when the agent exits
                written = shutil.copyfile(written, file)
            with suppress(Exception):  # the program has written another format
                failures[each.rank] = ProcessFailure(each.local_rank, each.pid, each.exit_code, str(written))
        if each.rank not in failures:
            message = each.message if is_own else f"{each.message} (on {each.host})"
            file.write_text(json.dumps({"message": message, "timestamp": now}), encoding="utf-8")
            failures[each.rank] = ProcessFailure(each.local_rank, each.pid, each.exit_code, str(file))
        # torch considers the failure with the earliest timestamp the root cause.
        failures[each.rank].timestamp = max(failures[each.rank].timestamp, failures[root.rank].timestamp)
    return failures
