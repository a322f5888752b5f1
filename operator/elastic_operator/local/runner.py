"""``elasticjob run FILE``: one job on this machine, from its manifest to its exit code.

The name, the control socket, the etcd and the pods of a run exist while :func:`run_job` runs. If the process is killed,
the kernel kills the others (:mod:`elastic_operator.local.pdeathsig`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
import uuid
from typing import TYPE_CHECKING

from elastic_operator.api.validation import Problem, problem_of
from elastic_operator.errors import BadInput
from elastic_operator.local.etcd import find_etcd
from elastic_operator.local.job import LiveJob
from elastic_operator.local.processes import check_program
from elastic_operator.local.run_dir import create_run, lock_name, reopen_run, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elastic_operator.local.run_dir import RunDir
    from elastic_operator.views.job_view import EndView, JobView


from elastic_operator.local.run import LocalRun, RunRequest, begin_end, manifest_text, on_signals


async def run_job(
    request: RunRequest, *, on_snapshot: Callable[[JobView], object], on_ending: Callable[[str], object]
) -> int:
    """Run a job on this machine until it has ended. This must be awaited in the main thread.

    Args:
        request: the parameters of the run.
        on_snapshot: called when the run has changed, at most ten times a second, and once more at the end.
        on_ending: called with a sentence when its pods are about to be ended.

    Returns:
        0 succeeded, 1 failed, 3 deleted, 130 interrupted.

    Raises:
        BadInput: the job cannot run here (exit code 2); nothing is left running.
    """
    manifest, now = request.manifest, time.time()
    if problem := problem_of(manifest.spec):
        raise BadInput(f"{manifest.source.path}: {problem}")
    end: asyncio.Future[EndView] = asyncio.get_running_loop().create_future()
    on_signals(lambda: begin_end(end, "interrupted"))
    with lock_name(request.home, manifest.name) as name:
        if request.resume is None:
            files = create_run(request.home, manifest.name, now)
        else:
            files = reopen_run(request.home, request.resume, manifest.name)
        print(f"run {files.run_id}, process {os.getpid()}", end="", file=name, flush=True)
        live = LiveJob(manifest, uid=str(uuid.uuid4()), created=now)
        _log_to(files.log)
        preparing = asyncio.ensure_future(_prepare(request, files, live))
        end.add_done_callback(lambda _: preparing.cancel())
        await asyncio.wait((preparing,))
        if (preparing.cancelled() or preparing.exception()) and request.resume is None:  # nothing was started
            shutil.rmtree(files.path, ignore_errors=True)
        if preparing.cancelled():
            ending = end.result()
        else:
            run = LocalRun(request, files, live, preparing.result(), end)
            ending = await run.main(name, on_snapshot, on_ending)
    if ending.how == "badInput":
        raise BadInput(ending.message)
    return ending.exit_code


async def _prepare(request: RunRequest, files: RunDir, live: LiveJob) -> Path | None:
    """Check that the job can run here; return the program of its etcd, or None if the manifest names one.

    Raises:
        BadInput: the job cannot run here.
    """
    source, spec = request.manifest.source, request.manifest.spec
    replace_file(files.manifest, manifest_text(source))
    try:
        await check_program(live.job, run=files, base=source.path.absolute().parent, environ=request.environ)
    except BadInput as error:
        sentence, field = str(error), "command" if spec.command else "args"
        if sentence.startswith("PET_NPROC_PER_NODE="):
            sentence, field = sentence.removeprefix("PET_NPROC_PER_NODE="), "nprocPerNode"
        raise source.bad_input([Problem(("spec", field), sentence)]) from None
    return find_etcd(request.environ.get("PATH")) if spec.etcd.endpoint is None else None


def _log_to(file: Path) -> None:
    """Log to a file, because the view uses the terminal."""
    try:
        logging.basicConfig(filename=file, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror}") from None
