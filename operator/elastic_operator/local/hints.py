"""What a user may try in a second terminal, and how it has to be spelled there."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_operator.showing import words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_operator.showing.shown import Shown


@dataclass(frozen=True, slots=True)
class Hints:
    """How the user's commands are spelled in a second terminal.

    Attributes:
        command: what starts ``elasticjob`` there.
        first: what has to be typed once before; empty where nothing has.
        here: what starts it in this terminal.
    """

    command: str = "elasticjob"
    first: str = ""
    here: str = "elasticjob"


def own_hints(argv0: str, environ: Mapping[str, str]) -> Hints:
    """How ``elasticjob`` is to be spelled in another terminal, and in this one.

    Args:
        argv0: how it was started in this one.
        environ: has the PATH.
    """
    path = Path(argv0)
    found = shutil.which("elasticjob", path=environ.get("PATH"))
    if path.name != "elasticjob" or not path.is_file():  # python -m
        module = f"{words.path_to_type(sys.executable)} -m elastic_operator.cli"
        return Hints() if found else Hints(command=module, here=module)
    on_path = found is not None and Path(found).samefile(path)
    here = "elasticjob" if on_path else words.path_to_type(argv0)
    activate = path.absolute().parent / "activate"
    # In an activated environment it is on this terminal's PATH, but not on that of the next one.
    if activate.is_file() and (not on_path or environ.get("VIRTUAL_ENV") is not None):
        return Hints(first=f". {words.path_to_type(str(activate))}", here=here)
    return Hints() if on_path else Hints(command=words.path_to_type(str(path.absolute())), here=here)


def suggestions(shown: Shown, hints: Hints) -> list[tuple[str, str]]:
    """What to try in a second terminal: the exact command, and what it does."""
    job, command = shown.name, hints.command
    rows = [(hints.first, "once, in each new terminal")] if hints.first else []
    if shown.status.state == "Suspended":
        rows.append((f"{command} resume {job}", "have it go on"))
        return rows + _always(job, command)
    other = _other_size(shown)
    if other is not None:
        rows.append((f"{command} scale {job} --replicas {other}", "change its size while it trains"))
    rows.append((f"{command} logs {job} --rank 0 -f", "follow one rank's output"))
    victim = next((pod for pod in reversed(shown.living_pods) if pod.pid and pod.ready), None)
    if victim is not None:
        rows.append((f"kill -9 {victim.pid}", f"kill pod {victim.name}"))
    return rows + _always(job, command)


def _always(job: str, command: str) -> list[tuple[str, str]]:
    return [
        (f"{command} describe {job}", "all that is known of it"),
        (f"{command} get", "all jobs on this machine"),
        (f"{command} delete {job}", "end it"),
    ]


def _other_size(shown: Shown) -> int | None:
    """A size within the job's bounds that it does not have now; one more where that can be."""
    least, most = shown.spec.get("minReplicas", 1), shown.spec.get("maxReplicas", 1)
    desired = shown.status.desired or shown.spec.get("replicas") or most
    if desired < most:
        return int(desired) + 1
    return int(desired) - 1 if desired > least else None
