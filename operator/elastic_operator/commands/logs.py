"""``elasticjob logs``: what the workers of a job, or its agents, have printed."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from elastic_operator.commands import place

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from elastic_operator.kube.user_api import UserApi
    from elastic_operator.local.log_files import LogFile, LogReader
    from elastic_operator.showing.shown import Shown
    from elastic_operator.showing.wanted_logs import Wanted

_EXAMPLES = """\
examples:
  elasticjob logs digits                     all ranks in the current epoch, each line with its rank
  elasticjob logs digits --rank 0 -f         one rank as it goes on, over all epochs that come
  elasticjob logs digits --epoch 2 --rank 1  what a rank printed in an earlier epoch
  elasticjob logs digits --agent --tail 20   the agents' own words
  elasticjob logs digits -n team -f          all ranks of a job on a cluster, also of the pods that come
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "logs",
        help="what a job's workers have printed",
        description="Print the output of a job's workers in one epoch: the current one, where none is named.\n"
        "On a cluster this is read from the logs of the job's pods, as far back as these are kept.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the job's name; on this machine also a run's id")
    parser.add_argument("--rank", type=_number, metavar="R", help="one rank; without it all, each line with its rank")
    parser.add_argument("--epoch", type=_number, metavar="E", help="another epoch than the current one")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on, from epoch to epoch, until the job has ended"
    )
    parser.add_argument("--tail", type=_number, metavar="N", help="only the last N lines of each rank, or agent")
    parser.add_argument("--pod", metavar="POD", help="only the workers (or with --agent, the agent) of this pod")
    parser.add_argument("--agent", action="store_true", help="the agents' own logs, not those of the workers")
    place.add_flags(parser)
    parser.set_defaults(execute=_execute)


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


_number.__name__ = "number of 0 or more"  # argparse says it in its message


def _execute(arguments: argparse.Namespace) -> int:
    from elastic_operator.errors import BadInput

    if arguments.agent and (arguments.rank is not None or arguments.epoch is not None):
        raise BadInput("an agent speaks for all ranks and epochs: leave out --agent, or --rank and --epoch")
    if place.is_on_cluster(arguments):
        return 0 if place.on_cluster(arguments, lambda api: _of_cluster(api, arguments)) else 1
    from pathlib import Path

    from elastic_operator.local.client import find_job
    from elastic_operator.local.log_files import LogReader
    from elastic_operator.showing.shown import Shown
    from elastic_operator.showing.wanted_logs import Wanted

    shown = Shown.of(find_job(arguments.name))
    wanted = Wanted(arguments.rank, arguments.pod, agents=arguments.agent)
    reader = LogReader(_write, label=not wanted.one_speaker, tail=arguments.tail)
    if arguments.follow and shown.run.alive:
        _follow(shown, wanted, reader, arguments.epoch)
    else:
        reader.read(chosen(Path(shown.run.logs), wanted, arguments.epoch))
        reader.finish()
    return 0


async def _of_cluster(api: UserApi, arguments: argparse.Namespace) -> bool:
    """Print logs of a cluster; whether all could be read."""
    from elastic_operator.kube.job_logs import LogRequest, read_logs
    from elastic_operator.kube.jobs import ClusterJobs, has_finished
    from elastic_operator.kube.log_following import LogFollowing
    from elastic_operator.showing.wanted_logs import Wanted

    job = await ClusterJobs(api, place.tell).object(arguments.name)
    follow = arguments.follow and not has_finished(job)
    request = LogRequest(
        job=job,
        wanted=Wanted(arguments.rank, arguments.pod, agents=arguments.agent),
        epoch=arguments.epoch,
        tail=arguments.tail,
        write=_write,
        tell=place.tell,
    )
    read = await read_logs(api, request, going_on=follow)
    if not follow:
        read.check()
    printed = read.print()
    if not follow:
        if read.complete and not printed and arguments.tail != 0:
            place.tell("these workers have printed nothing; what --log-dir sends to files stays in their pods")
        return read.complete
    following = LogFollowing(api, read)
    await following.run()
    return following.complete


def _follow(shown: Shown, wanted: Wanted, reader: LogReader, epoch: int | None) -> None:
    import threading
    from pathlib import Path

    from elastic_operator.local.log_files import follow

    ended = threading.Event()
    # It waits in a blocking read; as a daemon it does not keep the command from ending before the job.
    threading.Thread(target=_await_end, args=(shown.run.id, ended), daemon=True).start()
    follow(Path(shown.run.logs), wanted, reader, ended=ended, tell=place.tell, only=epoch)


def _await_end(run: str, ended: threading.Event) -> None:
    from elastic_operator.errors import ElasticJobError
    from elastic_operator.local.client import connect

    try:
        for _ in connect(run).watch():
            pass
    except ElasticJobError:  # it has ended already
        pass
    finally:
        ended.set()


def _write(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()


def chosen(logs: Path, wanted: Wanted, epoch: int | None) -> list[LogFile]:
    """The logs to print: of one epoch, the latest that there is where none is named.

    Raises:
        NotFound: there is no such log; the message says which there are.
    """
    from dataclasses import replace

    from elastic_operator.errors import NotFound
    from elastic_operator.local.log_files import log_files

    everything = log_files(logs, replace(wanted, rank=None, pod=None))
    there = [file for file in everything if wanted.pod in (None, file.pod)]
    if wanted.pod is not None and not there:
        pods = sorted({file.pod for file in everything})
        raise NotFound(f"there is no log of pod {wanted.pod}; there are logs of {', '.join(pods) or 'none'}")
    # Of a pod that is named, the latest in which it took part.
    latest = max((file.epoch for file in there), default=0) if epoch is None else epoch
    of_epoch = [file for file in there if file.epoch == latest and wanted.rank in (None, file.rank)]
    if of_epoch or wanted.agents:
        return of_epoch
    if not there:
        raise NotFound(f"no worker has started yet; what the agents say is in {logs}/*/agent.log (--agent)")
    epochs = sorted({file.epoch for file in there})
    if latest not in epochs:
        raise NotFound(f"there is no log of epoch {latest}; there are logs of epochs {_list(epochs)}")
    present = sorted({file.rank for file in there if file.epoch == latest})
    raise NotFound(f"there is no rank {wanted.rank} in epoch {latest}; it has ranks {_list(present)}")


def _list(numbers: list[int]) -> str:
    from elastic_operator.showing.words import ranks

    return ranks(tuple(numbers))
