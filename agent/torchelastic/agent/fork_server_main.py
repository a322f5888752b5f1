"""The fork server: a process that has torch imported and is forked into workers. ``python -c "… main()"`` runs it.

It has one thread of ours and never touches an accelerator: neither survives a fork. A worker is forked twice, so that
its parent becomes the agent, which watches and reaps it itself; the fork server may die and be started anew without
any worker's end going unnoticed.

It has nothing to clean up: when the agent dies, the kernel ends it (see :mod:`torchelastic.agent.guard` for the rest).
"""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING, Any, Protocol

from torchelastic.agent import messages, prctl, run_program
from torchelastic.agent.forked_child import STORE, take_order
from torchelastic.agent.import_environment import ImportEnvironment
from torchelastic.agent.inherited import close_inherited
from torchelastic.agent.preloading import Importer, fork
from torchelastic.agent.store_main import StoreRole
from torchelastic.agent.title import set_title
from torchelastic.agent.worker_main import WorkerRole

if TYPE_CHECKING:
    from collections.abc import Sequence


class Role(Protocol):
    """What a forked process is for."""

    def play(self) -> None:
        """Be that, until the end of the process."""


def main() -> None:
    """Serve the agent until it is gone; in a forked child, become what it was forked for."""
    close_inherited(messages.CONTROL + 1)
    agent = os.getppid()
    prctl.set_parent_death_signal(signal.SIGKILL)
    set_title(["torchelastic: fork server"])
    with socket.socket(fileno=messages.CONTROL) as control:
        role = _Server(control, agent).serve()
    if role is not None:
        role.play()


class _Server:
    """What the agent asks for, done.

    Args:
        control: the connection to the agent.
        agent: its process id.
    """

    def __init__(self, control: socket.socket, agent: int) -> None:
        self._control = control
        self._agent = agent
        self._environment = ImportEnvironment()
        self._importer = Importer(self._environment)
        self._tell = ""

    def serve(self) -> Role | None:
        """Serve; returns None when the agent is gone, and in a child its role."""
        error = self._importer.import_torch()
        while True:
            try:
                message, descriptors = messages.receive(self._control)
            except EOFError:
                return None
            match message:
                case {"preload": modules, "kind": kind, "program": name, "tell": tell}:  # always the first one
                    self._tell = tell
                    error = error or self._importer.preload(modules, run_program.search_path(kind, name))
                    messages.send(self._control, {"error": error})
                case {"import": modules}:
                    problem = self._importer.import_later(modules)
                    read = {name for module in modules for name in self._environment.read[module]}
                    messages.send(self._control, {"error": problem, "read": sorted(read)})
                case _:
                    role = self._fork([socket.socket(fileno=descriptor) for descriptor in descriptors])
                    if role is not None:
                        return role

    def _fork(self, links: Sequence[socket.socket]) -> Role | None:
        answer, link = _fork_twice(links)
        for other in links:
            if other is not link:
                other.close()
        if link is None:
            messages.send(self._control, answer)
            return None
        self._control.close()
        order = take_order(link, self._agent)
        if order.role == STORE:
            return StoreRole(link=link, listener=order.descriptors[0], **order.payload)
        link.close()
        return WorkerRole(imports=self._environment, tell=self._tell, **order.payload)


def _fork_twice(links: Sequence[socket.socket]) -> tuple[dict[str, Any], socket.socket | None]:
    """Fork one child for each link, not as our own child but as an orphan, which the agent inherits.

    Returns:
        What to tell the agent; or, in such a child, its link.
    """
    reading, writing = os.pipe()
    middle = fork()
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
            pid = fork()
        except OSError as error:
            answer["error"] = f"no process can be forked: {error.strerror}"
            break
        if pid == 0:
            os.close(writing)
            return link
        pids.append(pid)
    os.write(writing, messages.encode(answer))
    os._exit(0)
