"""Any sequence of joins, leaves, deaths, failures and changes of size keeps the promises of the rendezvous."""

from __future__ import annotations

import dataclasses

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.views import SETTINGS, failure, record
from torchelastic.contract import (
    EpochRecord,
    FailureKind,
    NodePhase,
    NodeRecord,
    OutcomeRecord,
    OutcomeState,
    SizeRecord,
)
from torchelastic.rendezvous.decide import EndRun, FormEpoch, Hold, Peer, View, decide

MAX_NODES = 6
RULES = dataclasses.replace(SETTINGS, max_restarts=1000, early_failures=1000, join_timeout=1e9)


@dataclasses.dataclass
class Node:
    record: NodeRecord
    joined: int
    arrived: float
    key: bool = True
    alive: bool = True
    failed_at: int = 0


class Leading(RuleBasedStateMachine):
    """One leader, a handful of nodes, a clock, and a store that can lose its data."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.revision = 1
        self.nodes: dict[str, Node] = {}
        self.size = SizeRecord(min=2, max=4, wanted=None)
        self.epoch: EpochRecord | None = None
        self.remembered: EpochRecord | None = None
        self.outcome: OutcomeRecord | None = None
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self.done: set[str] = set()
        self.changed_at = 0.0
        self.failed_since: float | None = None
        self.history: list[EpochRecord] = []
        self.failures = 0

    # -- what happens to nodes

    @rule()
    def a_node_joins(self) -> None:
        if sum(node.alive for node in self.nodes.values()) < MAX_NODES:
            self.revision += 1
            name = f"n{self.revision}"
            self.nodes[f"{name}.0000"] = Node(record(name), self.revision, self.now)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def a_node_leaves(self, data: st.DataObject) -> None:
        node = self.nodes[data.draw(st.sampled_from(sorted(self.nodes)))]
        node.record = msgspec.structs.replace(node.record, phase=NodePhase.LEAVING)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), known=st.booleans())
    def a_node_dies(self, data: st.DataObject, known: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.nodes)))
        self.nodes[name].alive = False
        self.silent.discard(name)
        if known:
            self.dead.add(name)

    @rule()
    def the_leases_of_the_dead_end(self) -> None:
        self.nodes = {name: node for name, node in self.nodes.items() if node.alive}

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def a_lease_ends_though_its_node_lives(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.nodes)))
        if self.nodes[name].alive:
            self.nodes[name].key = False
            self.silent.add(name)

    @rule()
    def the_living_put_their_keys_again(self) -> None:
        for name in list(self.silent):
            self.nodes[name].key = True
        self.silent.clear()

    @precondition(lambda self: self.epoch is not None and self.epoch.members)
    @rule(data=st.data(), kind=st.sampled_from(list(FailureKind)))
    def a_worker_fails(self, data: st.DataObject, kind: FailureKind) -> None:
        assert self.epoch is not None
        name = data.draw(st.sampled_from(self.epoch.nodes))
        node = self.nodes.get(name)
        if node is not None and node.alive and node.record.epoch == self.epoch.number and node.record.failure is None:
            self.revision += 1
            broken = failure(node.record.name, number=self.epoch.number, kind=kind)
            node.record = msgspec.structs.replace(node.record, failure=broken)
            node.failed_at = self.revision
            self.failures += 1
            if self.failed_since is None:
                self.failed_since = self.now

    @precondition(lambda self: self.epoch is not None and self.epoch.members)
    @rule(data=st.data())
    def the_workers_of_a_node_end_with_0(self, data: st.DataObject) -> None:
        assert self.epoch is not None
        name = data.draw(st.sampled_from(self.epoch.nodes))
        node = self.nodes.get(name)
        if node is not None and node.record.epoch == self.epoch.number and node.record.failure is None:
            node.record = msgspec.structs.replace(node.record, phase=NodePhase.DONE)
            self.done.add(name)

    @rule(low=st.integers(1, 3), more=st.integers(0, 3), wanted=st.none() | st.integers(0, 7))
    def the_size_changes(self, low: int, more: int, wanted: int | None) -> None:
        going = tuple(sorted(node.record.name for node in self.nodes.values())[:1]) if wanted == 1 else ()
        self.size = SizeRecord(min=low, max=low + more, wanted=wanted, going=going, generation=self.size.generation + 1)

    @rule(knows=st.booleans())
    def the_store_loses_its_data(self, knows: bool) -> None:
        self.epoch = None
        if not knows:
            self.remembered = None
            if not any(node.key and node.record.epoch == self.number() for node in self.nodes.values()):
                self.history.clear()  # nobody is left who could know

    @rule(seconds=st.sampled_from([0.01, 0.2, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # -- what the nodes and the leader do

    @rule()
    def the_nodes_take_note_of_the_epoch(self) -> None:
        if self.epoch is None:
            return
        for node in self.nodes.values():
            if node.alive and node.key and node.record.epoch < self.epoch.number:
                phase = node.record.phase if node.record.phase is NodePhase.LEAVING else NodePhase.READY
                node.record = msgspec.structs.replace(
                    node.record,
                    epoch=self.epoch.number,
                    restarts=self.epoch.restarts,
                    store=node.record.store + 1,
                    phase=phase,
                    failure=None,
                )

    @rule()
    def the_leader_decides(self) -> None:
        if self.epoch is None and self.remembered is None:
            self.the_living_put_their_keys_again()  # it has given way to them for a lease's time
        decision = decide(self.view(), RULES)
        if isinstance(decision, EndRun):
            self.outcome = decision.record
            assert decision.record.state is OutcomeState.SUCCEEDED
            assert self.epoch is not None
            assert set(self.epoch.nodes) <= self.done
        elif isinstance(decision, FormEpoch):
            self.check_epoch(decision.record)
            restored = decision.record == self.remembered
            self.epoch = self.remembered = decision.record
            if not restored:
                self.history.append(decision.record)
                self.changed_at = self.now
                self.failed_since = None
                self.done = set()

    def number(self) -> int:
        return self.history[-1].number if self.history else 0

    def view(self) -> View:
        peers = {
            name: Peer(name, node.record, node.joined, node.arrived, failed_at=node.failed_at)
            for name, node in self.nodes.items()
            if node.key
        }
        return View(
            now=self.now,
            peers=peers,
            size=self.size,
            epoch=self.epoch,
            remembered=self.remembered,
            outcome=self.outcome,
            silent=frozenset(self.silent),
            dead=frozenset(self.dead),
            done=frozenset(self.done),
            changed_at=self.changed_at,
            failed_since=self.failed_since,
            gave_way=True,
        )

    def check_epoch(self, new: EpochRecord) -> None:
        if new == self.remembered:
            return
        if self.epoch is None and not any(node.key and node.record.epoch for node in self.nodes.values()):
            self.history.clear()
        assert self.outcome is None
        assert not self.history or new.number > self.history[-1].number
        assert len(set(new.nodes)) == len(new.nodes)
        assert not new.members or self.size.min <= len(new.members) <= self.size.max
        for name in new.nodes:
            assert name in self.nodes
            assert name not in self.dead
            assert self.nodes[name].record.phase is not NodePhase.LEAVING
        if new.members:
            host = new.store.rpartition(":")
            assert new.store not in {old.store for old in self.history}
            assert host[0] in {member.address for member in new.members}
        survivors = [name for name in (self.epoch.nodes if self.epoch else ()) if name in new.nodes]
        assert [name for name in new.nodes if name in survivors] == survivors

    @invariant()
    def no_failure_is_charged_twice(self) -> None:
        if self.epoch is not None:
            assert self.epoch.restarts <= self.failures

    def teardown(self) -> None:
        """Once the faults stop, whoever lives trains together, and then nothing changes any more."""
        self.the_leases_of_the_dead_end()
        self.the_living_put_their_keys_again()
        for node in self.nodes.values():
            if node.record.phase is not NodePhase.LEAVING:
                node.record = msgspec.structs.replace(node.record, phase=NodePhase.READY)
        self.nodes = {name: node for name, node in self.nodes.items() if node.record.phase is not NodePhase.LEAVING}
        self.done = set()
        for _ in range(20):
            self.now += 20.0
            self.the_nodes_take_note_of_the_epoch()
            self.the_leader_decides()
        if self.outcome is not None:
            return
        self.the_nodes_take_note_of_the_epoch()
        assert isinstance(decide(self.view(), RULES), Hold)
        fit = [name for name, node in self.nodes.items() if node.record.name not in self.size.going]
        if len(fit) >= self.size.min:
            assert self.epoch is not None
            assert len(self.epoch.members) == min(len(fit), self.size.target)
        elif self.epoch is not None and self.epoch.members:
            assert all(name not in self.nodes for name in self.epoch.nodes)


TestLeading = Leading.TestCase
TestLeading.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
