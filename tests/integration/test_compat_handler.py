"""The rendezvous as a RendezvousHandler with blocking calls: no caller waits in a finished round.

Threads simulate agents and do what torch's agent does: meet, exchange a value through the store of
the round, check for waiting nodes, and meet again.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

import pytest

from torchelastic.rendezvous import (
    RendezvousClosedError,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.etcd import EtcdServer
    from torchelastic.rendezvous import RendezvousHandler

pytestmark = pytest.mark.integration

LIMIT = 180.0
"""Seconds that a test waits before it fails."""


class SimulatedAgent:
    """An agent without workers, which leaves the run when the ``with`` block ends.

    Attributes:
        failing: an event that the test sets to simulate a failure of the workers.
        finishing: an event that the test sets to simulate the success of the workers.
    """

    def __init__(self, handler: RendezvousHandler, name: str) -> None:
        self.handler = handler
        self.name = name
        self.worlds: list[list[str]] = []
        self.error: Exception | None = None
        self.failing = threading.Event()
        self.finishing = threading.Event()
        self._leaving = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self.wait_until_ended()

    def leave(self) -> None:
        """Let the agent leave the run."""
        self._leaving.set()
        self.handler.set_closed()

    def wait_until_ended(self) -> None:
        """Wait until the agent has stopped."""
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), f"{self.name} hangs after the rounds {self.worlds}"

    def wait_for_round(self, *names: str, since: int = 0) -> int:
        """Wait until the agent has been in a round of exactly these agents, and return the number of rounds so far."""
        with self._changed:
            found = self._changed.wait_for(lambda: any(set(each) == set(names) for each in self.worlds[since:]), LIMIT)
            assert found, f"{self.name} had the rounds {self.worlds[since:]}, {self.error}"
            return len(self.worlds)

    def _run(self) -> None:
        try:
            while not self._is_ending():
                self.failing.clear()
                names = self._exchange(self.handler.next_rendezvous())
                with self._changed:
                    self.worlds.append(names)
                    self._changed.notify_all()
                while not (self._is_ending() or self.failing.is_set() or self.handler.num_nodes_waiting()):
                    time.sleep(0.005)
            if self.finishing.is_set():
                self.handler.shutdown()
        except Exception as error:  # noqa: BLE001 - the test checks the error
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _is_ending(self) -> bool:
        return self.finishing.is_set() or self._leaving.is_set()

    def _exchange(self, info: Any) -> list[str]:
        info.store.set(f"name/{info.rank}", self.name)
        return [info.store.get(f"name/{rank}").decode() for rank in range(info.world_size)]


@pytest.fixture
def agent(etcd: EtcdServer) -> Iterator[Callable[..., SimulatedAgent]]:
    """A function that creates agents of one run; they are stopped after the test."""
    run_id = str(uuid.uuid4())
    with contextlib.ExitStack() as stack:

        def make(name: str, least: int = 1, most: int = 8, **config: Any) -> SimulatedAgent:
            parameters = RendezvousParameters(
                "torchelastic", etcd.endpoint, run_id, least, most, local_addr="127.0.0.1", **{"lease": 1, **config}
            )
            return stack.enter_context(SimulatedAgent(rendezvous_handler_registry.create_handler(parameters), name))

        yield make


# The garbage collector closes a connection that was accepted but not yet served when its server closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(3))
def test_no_node_waits_in_a_finished_round_in_any_scenario(agent: Callable[..., SimulatedAgent], seed: int) -> None:
    dice = random.Random(seed)
    there = [agent(f"{number}", last_call_timeout=0, join_debounce=0) for number in range(2)]
    for number in range(2, 25):
        match dice.choice(["come", "go", "fail", "fail"]):
            case "come" if len(there) < 6:
                there.append(agent(f"{number}", last_call_timeout=0, join_debounce=0))
            case "go" if len(there) > 1 and (been := [each for each in there if each.worlds]):
                going = dice.choice(been)
                there.remove(going)
                going.leave()
            case _:
                dice.choice(there).failing.set()
        time.sleep(dice.choice([0, 0.002, 0.05]))
    newest = agent("last", last_call_timeout=0, join_debounce=0)
    for each in [*there, newest]:
        each.wait_for_round("last", *(other.name for other in there))
        assert each.error is None


def test_a_run_succeeds_when_all_workers_have_succeeded_and_its_id_can_be_reused(
    agent: Callable[..., SimulatedAgent],
) -> None:
    agents = [agent(name, least=2, most=2) for name in "ab"]
    for each in agents:
        each.wait_for_round(*"ab")
        assert not each.handler.is_closed()
    agents[0].finishing.set()
    agents[1].finishing.set()
    for each in agents:
        each.wait_until_ended()
        assert each.handler.is_closed()
        assert each.error is None
    agent("c", most=1).wait_for_round("c")  # the id can be reused


def test_an_agent_with_an_internal_error_leaves_and_the_run_continues(agent: Callable[..., SimulatedAgent]) -> None:
    a, b = agent("a", most=2), agent("b", most=2)
    a.wait_for_round(*"ab")
    b.wait_for_round(*"ab")
    with contextlib.suppress(LookupError):
        try:
            {}["its workers have failed for good"]
        finally:
            a.handler.shutdown()
    b.wait_for_round("b")
    assert a.handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="has left"):
        a.handler.next_rendezvous()
    c = agent("c", most=2)
    b.wait_for_round(*"bc")
    c.wait_for_round(*"bc")


def test_too_few_agents_wait_for_the_configured_time(agent: Callable[..., SimulatedAgent]) -> None:
    a = agent("a", least=2, most=2, timeout=0.3)
    a.wait_until_ended()
    assert isinstance(a.error, RendezvousTimeoutError)
    assert "no more nodes joined within 0.3 s: 1 node" in str(a.error)
