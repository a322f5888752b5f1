"""The fork server: a process that has torch imported and is forked into workers. ``python -c "… main()"`` runs it.

It has one thread of ours and never touches an accelerator: neither survives a fork. A worker is forked twice, so that
its parent becomes the agent, which watches and reaps it itself; the fork server may die and be started anew without
any worker's end going unnoticed.

It has nothing to clean up: when the agent dies, the kernel ends it (see :mod:`torchelastic.agent.guard` for the rest).
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import warnings
from typing import TYPE_CHECKING, Any, Final

from torchelastic.agent import forked_child, messages, prctl
from torchelastic.agent.inherited import close_inherited
from torchelastic.agent.title import set_title

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROL: Final = 3
"""The descriptor of the connection to the agent."""


def main() -> None:
    """Serve the agent until it is gone; in a forked child, become what it was forked for."""
    close_inherited(CONTROL + 1)
    agent = os.getppid()
    prctl.set_parent_death_signal(signal.SIGKILL)
    set_title(["torchelastic: fork server"])
    with socket.socket(fileno=CONTROL) as control:
        messages.send(control, {"error": _import(["torch.distributed"])})
        role = _serve(control, agent)
    if role is not None:
        role.play()


def _import(modules: Sequence[str]) -> str:
    """Import what workers need; why it cannot be, or an empty string."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken installation can raise anything
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
        gc.freeze()  # so that a collection in a child does not write to, and so copy, the pages that it shares
    return ""


def _serve(control: socket.socket, agent: int) -> forked_child.Role | None:
    """Fork what the agent asks for; returns None when it is gone, and in a child its role."""
    while True:
        try:
            message, descriptors = messages.receive(control)
        except EOFError:
            return None
        if "import" in message:
            messages.send(control, {"error": _import(message["import"])})
            continue
        links = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        answer, link = _fork_twice(links)
        for other in links:
            if other is not link:
                other.close()
        if link is not None:
            control.close()
            return forked_child.take_role(link, agent)
        messages.send(control, answer)


def _fork_twice(links: Sequence[socket.socket]) -> tuple[dict[str, Any], socket.socket | None]:
    """Fork one child for each link, not as our own child but as an orphan, which the agent inherits.

    Returns:
        What to tell the agent; or, in such a child, its link.
    """
    reading, writing = os.pipe()
    middle = _fork()
    if middle == 0:
        os.close(reading)
        return {}, _fork_each(links, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    os.waitpid(middle, 0)  # from here on the agent is the parent of what it forked
    return messages.decode(answer) if answer else {"error": "the process that forks workers died"}, None


def _fork_each(links: Sequence[socket.socket], writing: int) -> socket.socket:
    """Fork, tell the ids, and end; returns only in the children, with their links."""
    pids: list[int] = []
    answer: dict[str, Any] = {"pids": pids}
    for link in links:
        try:
            pid = _fork()
        except OSError as error:
            answer["error"] = f"no process can be forked: {error.strerror}"
            break
        if pid == 0:
            os.close(writing)
            return link
        pids.append(pid)
    os.write(writing, messages.encode(answer))
    os._exit(0)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of forking beside other threads. There is one, of a numerical library, and it knows about forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
