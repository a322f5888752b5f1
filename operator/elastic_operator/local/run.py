"""``elasticjob run FILE``: one job on this machine, from its manifest to its exit code.

What belongs to a run lives exactly as long as :func:`run_job`: its name, its control socket, its etcd, its pods. If
this process is killed, the kernel ends the others (:mod:`elastic_operator.local.tether`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import secrets
import shutil
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from elastic_operator.errors import BadInput
from elastic_operator.local.ending import Ending, How, RunEnd
from elastic_operator.local.etcd_binary import find_etcd
from elastic_operator.local.etcd_process import EtcdSettings
from elastic_operator.local.live_job import LiveJob
from elastic_operator.local.name_claim import NameTaken, claim
from elastic_operator.local.pod_command import PodCommands
from elastic_operator.local.run_folder import create_run, private_folder, reopen_run
from elastic_operator.local.running import LocalRun, RunParts
from elastic_operator.pods import problem_of
from elastic_operator.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping
    from pathlib import Path

    from elastic_operator.local.name_claim import NameClaim
    from elastic_operator.local.running import Observer
    from elastic_operator.manifest import ElasticJobManifest
    from elastic_operator.spec import ElasticJobSpec

_Result = TypeVar("_Result")

_SOCKET_NAME_LIKE: Final = "12345678.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run.

    Attributes:
        manifest: the job.
        home: where runs are kept, see :func:`elastic_operator.local.run_folder.home_folder`.
        environ: the environment that the pods inherit.
        resume: the id of an earlier run of this job to go on with, in its folder and from its checkpoints; None to
            start afresh.
    """

    manifest: ElasticJobManifest
    home: Path
    environ: Mapping[str, str]
    resume: str | None = None


async def run_job(request: RunRequest, *, observer: Observer | None = None) -> int:
    """Run a job on this machine until it has ended, in whichever way.

    SIGINT, SIGTERM and SIGHUP end it in order; a second one ends it at once. To be awaited in the main thread.

    Args:
        request: what to run.
        observer: shown every change.

    Returns:
        0 succeeded, 1 failed, 3 deleted, 130 interrupted.

    Raises:
        BadInput: something of it cannot be (exit code 2); nothing is left running.
    """
    if platform.system() != "Linux":
        raise BadInput("jobs can be run on Linux only; on another system, use a Linux machine or container")
    if problem := problem_of(request.manifest.spec):
        raise BadInput(f"{request.manifest.source.path}: {problem}")
    end = RunEnd()
    with end.on_signals(), _claimed(request) as name:
        parts = _parts(request, name)
        with _logging_to(parts.folder.log):
            etcd = await _unless_ended(end, _prepare(request, parts))
            if etcd is not None:
                ending = await LocalRun(parts, etcd.own, end).main(observer)
            else:
                ending = await end.wait()
        if etcd is None and request.resume is None:
            shutil.rmtree(parts.folder.path, ignore_errors=True)
        if ending.error is not None:
            raise ending.error
        return ending.how.exit_code


def _parts(request: RunRequest, name: NameClaim) -> RunParts:
    job, now = request.manifest.name, time.time()
    file = request.manifest.source.path.absolute()
    socket = private_folder(request.environ, _SOCKET_NAME_LIKE) / f"{secrets.token_hex(4)}.sock"
    if request.resume is None:
        folder = create_run(request.home, job, now)
    else:
        folder = reopen_run(request.home, request.resume, job)
    return RunParts(
        live=LiveJob(request.manifest, uid=str(uuid.uuid4()), created=now),
        file=file,
        folder=folder,
        name=name,
        socket=socket,
        commands=PodCommands(run=folder, base=file.parent, environ=request.environ),
    )


@dataclass(frozen=True, slots=True)
class _Etcd:
    """Where the store comes from: ``own`` is None where the manifest names one that is there already."""

    own: EtcdSettings | None


async def _prepare(request: RunRequest, parts: RunParts) -> _Etcd:
    """See that the job can run here, before anything of it is started.

    Raises:
        BadInput: it can't.
    """
    try:
        parts.folder.write_manifest(request.manifest.source.data)
    except OSError as error:
        raise BadInput(f"cannot write {parts.folder.manifest}: {error.strerror}") from None
    try:
        await parts.commands.check(parts.live.job())
    except BadInput as error:
        raise request.manifest.source.bad_input([_field_at_fault(request.manifest.spec, f"{error}")]) from None
    if request.manifest.spec.etcd.endpoint is not None:
        return _Etcd(None)
    binary = await find_etcd(request.environ.get("PATH"))
    return _Etcd(EtcdSettings(binary, parts.folder.etcd, parts.folder.etcd_log, request.environ))


def _field_at_fault(spec: ElasticJobSpec, sentence: str) -> Problem:
    """What the agent says of its command line, put to the field of the manifest that it came from."""
    if sentence.startswith("PET_NPROC_PER_NODE="):
        return Problem(("spec", "nprocPerNode"), sentence.removeprefix("PET_NPROC_PER_NODE="))
    return Problem(("spec", "command" if spec.command else "args"), sentence)


async def _unless_ended(end: RunEnd, work: Coroutine[None, None, _Result]) -> _Result | None:
    """What the work gives back; None where the run is to end before that, or where the work finds that it can't be."""
    working = asyncio.ensure_future(work)
    ending = asyncio.ensure_future(end.wait())
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    except BadInput as error:
        end.begin(Ending(How.BAD_INPUT, str(error), error))
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.wait((working, ending))
    return None


@contextlib.contextmanager
def _claimed(request: RunRequest) -> Iterator[NameClaim]:
    try:
        with claim(request.home, request.manifest.name) as name:
            yield name
    except NameTaken as taken:
        if request.resume is None or taken.holder is None or taken.holder.run != request.resume:
            raise
        raise BadInput(
            f"run {request.resume} is still going on (process {taken.holder.pid}), so it cannot be resumed; "
            f"end it first with `elasticjob delete {request.manifest.name}`"
        ) from None


@contextlib.contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    """What the parts log goes into a file: the terminal is the view's."""
    try:
        handler = logging.FileHandler(file)
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("elastic_operator", "torchelastic", "aiohttp", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
