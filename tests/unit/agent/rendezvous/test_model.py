"""A model of the rendezvous: its invariants hold under any order of faults of nodes, connections, leases and the store.

The store, the nodes and the leaders are simulated; the classes of the membership and the function ``plan`` are
production code. Several nodes may believe that they lead, and each receives the store's changes late, in parts and
repeatedly.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.views import SETTINGS, failure, record
from torchelastic.protocol.codec import decode_state, encode
from torchelastic.protocol.keys import RunKeys
from torchelastic.protocol.records import (
    FailureKind,
    LeaderRecord,
    NodePhase,
    NodeRecord,
    NoticeRecord,
    OutcomeRecord,
    OutcomeState,
    RoundReason,
    RoundRecord,
    SizeRecord,
    StateRecord,
)
from torchelastic.rendezvous.policy.membership import Membership
from torchelastic.rendezvous.policy.plan import (
    Decision,
    Hold,
    Resign,
    plan,
)
from torchelastic.rendezvous.run_watch import RunWatch, Versioned
from torchelastic.store.api import Change, Entry, Listing
from torchelastic.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NODES = 6
KEYS = RunKeys("run")
RULES = dataclasses.replace(SETTINGS, max_restarts=1000, crash_loop_limit=1000, join_timeout=1e9)


class SimulatedStore:
    """A simplified etcd: revisions, compare-and-swap, and ordered changes for each listener."""

    def __init__(self) -> None:
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.listeners: list[Listener] = []

    def write(self, key: str, value: bytes | None) -> int:
        self.revision += 1
        before = self.entries.pop(key, None)
        if value is not None:
            created = self.revision if before is None else before.create_revision
            self.entries[key] = Entry(key, value, created, self.revision)
        elif before is None:
            return self.revision
        for listener in self.listeners:
            listener.deliver(Change(key, self.entries.get(key), self.revision))
        return self.revision

    def compare_and_swap(self, key: str, value: bytes, expected: int) -> int | None:
        return self.write(key, value) if self.mod_revision(key) == expected else None

    def mod_revision(self, key: str) -> int:
        return self.entries[key].mod_revision if key in self.entries else 0

    def list_prefix(self, prefix: str) -> Listing:
        return Listing(self.revision, tuple(entry for key, entry in self.entries.items() if key.startswith(prefix)))

    def restore(self, revision: int, entries: dict[str, Entry]) -> None:
        """Restore an earlier state, which the listeners then have to list again."""
        self.revision = revision
        self.entries = entries.copy()

    @property
    def state(self) -> StateRecord:
        entry = self.entries.get(KEYS.state)
        return StateRecord() if entry is None else decode_state(entry.value)

    @property
    def round(self) -> RoundRecord | None:
        return self.state.round

    @property
    def outcome(self) -> OutcomeRecord | None:
        return self.state.outcome


class Listener:
    """One node's view of the store, and the changes that it has not received yet."""

    def __init__(self, store: SimulatedStore, node: str) -> None:
        self.store = store
        self.node = node
        self.run = RunWatch(node, RULES, MemoryStore())
        self.membership: Membership | None = None
        self.run_changes: deque[Change] = deque()
        self.node_changes: deque[Change] = deque()
        self.reconnected_at = -1e9
        store.listeners.append(self)
        self.run.replace(store.list_prefix(KEYS.control))

    def deliver(self, change: Change) -> None:
        (self.node_changes if change.key.startswith(KEYS.nodes) else self.run_changes).append(change)

    def apply_run_changes(self, count: int) -> None:
        for _ in range(min(count, len(self.run_changes))):
            self.run.apply(self.run_changes.popleft())

    def is_leader(self) -> bool:
        leader = self.run.leader.record
        return self.membership is not None and leader is not None and leader.node == self.node


@dataclasses.dataclass
class Node:
    """A node and its view of the run."""

    record: NodeRecord
    listener: Listener
    alive: bool = True
    has_key: bool = True
    reachable: bool = True
    resigned: bool = False
    known_round: RoundRecord | None = None
    expired_at: float = 0.0
    may_count_as_lost: bool = False
    """Whether the node is dead, partitioned, unknown to a leader, or unreachable with an expired lease."""

    @property
    def leaving(self) -> bool:
        return self.record.phase is NodePhase.LEAVING


def copied(membership: Membership) -> Membership:
    """Return a copy that does not change when the leader's membership changes."""
    values = {field.name: getattr(membership, field.name) for field in dataclasses.fields(membership) if field.init}
    return Membership(
        **{name: value.copy() if isinstance(value, dict | set) else value for name, value in values.items()}
    )


@dataclasses.dataclass(frozen=True)
class Pending:
    """A decision that is not committed yet."""

    name: str
    snapshot: Membership
    decision: Decision
    state: Versioned[StateRecord]
    registered: frozenset[str]
    """The live nodes that had a key at the time of the decision, except those whose new key the leader did not know."""


def rule_for_node(fit: Callable[[Node], bool], **strategies: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """Return a decorator that makes a rule for one of the nodes that satisfy a condition."""

    def decorate(action: Callable[..., None]) -> Any:
        def choose(self: RendezvousModel, data: st.DataObject, **drawn: Any) -> None:
            action(self, data.draw(st.sampled_from([name for name, node in self.nodes.items() if fit(node)])), **drawn)

        choose.__name__ = action.__name__
        possible = precondition(lambda self: any(map(fit, self.nodes.values())))
        return possible(rule(data=st.data(), **strategies)(choose))

    return decorate


def is_alive(node: Node) -> bool:
    return node.alive


def is_training(node: Node) -> bool:
    round, phase = node.known_round, node.record.phase
    return node.alive and round is not None and node.listener.node in round.nodes and phase is not NodePhase.PARTITIONED


def is_healthy(node: Node) -> bool:
    return is_training(node) and node.record.failure is None


class RendezvousModel(RuleBasedStateMachine):
    """A few nodes, a store that can lose its data, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0
        self.store = SimulatedStore()
        self.nodes: dict[str, Node] = {}
        self.created_nodes = 0
        self.size = SizeRecord(min=2, max=4)
        self.committed: list[RoundRecord] = []
        self.requested_notice = 0.0
        self.failures = 0
        self.final: set[str] = set()
        self.finished: set[tuple[str, int]] = set()
        self.pending: Pending | None = None
        self.nonces = 0
        self.backup: tuple[int, dict[str, Entry]] = (1, {})

    # -- faults of nodes

    @rule(topology_key=st.sampled_from(["", "x", "y"]))
    def a_node_joins(self, topology_key: str) -> None:
        self.add_node(topology_key)

    @rule_for_node(lambda node: node.alive and node.record.phase is not NodePhase.DONE)
    def a_node_leaves(self, name: str) -> None:
        self.report(name, phase=NodePhase.LEAVING)
        if self.nodes[name].listener.is_leader():
            self.resign(name)

    @rule_for_node(lambda node: node.alive and node.leaving)
    def a_leaving_node_exits(self, name: str) -> None:
        self.kill(name)
        self.delete_key(name)

    @rule_for_node(is_alive)
    def a_node_dies(self, name: str) -> None:
        self.kill(name)

    @rule_for_node(lambda node: node.has_key and not node.alive)
    def the_lease_of_a_dead_node_expires(self, name: str) -> None:
        self.delete_key(name)

    @rule_for_node(lambda node: node.alive and node.has_key, reachable=st.booleans())
    def the_lease_of_a_live_node_expires(self, name: str, reachable: bool) -> None:
        self.nodes[name].reachable = reachable
        self.nodes[name].may_count_as_lost |= not reachable
        self.delete_key(name)

    @rule_for_node(lambda node: node.alive and not node.has_key)
    def a_node_restores_its_key(self, name: str) -> None:
        self.restore_key(name)

    @rule_for_node(lambda node: is_healthy(node) and node.record.phase is NodePhase.READY, answers=st.booleans())
    def a_member_is_partitioned(self, name: str, answers: bool) -> None:
        self.nodes[name].reachable = answers
        self.nodes[name].may_count_as_lost = True
        self.report(name, phase=NodePhase.PARTITIONED)

    # -- changes of workers

    @rule_for_node(is_healthy, kind=st.sampled_from(list(FailureKind)), final=st.sampled_from([False] * 19 + [True]))
    def a_worker_fails(self, name: str, kind: FailureKind, final: bool) -> None:
        node = self.nodes[name]
        broken = failure(node.record.name, number=node.record.round, kind=kind)
        self.failures += 1
        if final:
            self.final.add(name)
        self.report(name, failure=msgspec.structs.replace(broken, non_retryable=final))

    @rule_for_node(is_healthy)
    def the_workers_of_a_node_succeed(self, name: str) -> None:
        self.finish(name)

    @rule_for_node(is_training, seconds=st.sampled_from([1.0, 20.0, 500.0]))
    def workers_ask_for_a_notice(self, name: str, seconds: float) -> None:
        self.report(name, notice=seconds)

    @rule_for_node(
        lambda node: is_training(node) and node.record.notice > 0 and node.listener.run.notice.record is not None
    )
    def workers_answer_a_notice(self, name: str) -> None:
        notice = self.nodes[name].listener.run.notice.record
        assert notice is not None
        if notice.round == self.nodes[name].record.round:
            self.report(name, answered_notice=notice.number)

    # -- changes of the run and the store

    @rule(low=st.integers(1, 3), more=st.integers(0, 3), wanted=st.none() | st.integers(0, 7))
    def the_size_changes(self, low: int, more: int, wanted: int | None) -> None:
        draining = (
            tuple(sorted(node.record.name for node in self.nodes.values() if node.alive)[:1]) if wanted == 1 else ()
        )
        self.size = SizeRecord(
            min=low, max=low + more, desired=wanted, draining=draining, generation=self.size.generation + 1
        )
        self.store.write(KEYS.size, encode(self.size))

    @rule()
    def the_store_is_backed_up(self) -> None:
        self.backup = (self.store.revision, self.store.entries.copy())

    @rule(loses=st.sampled_from(["nothing", "leases", "recent changes", "everything"]), new_node_leads=st.booleans())
    def the_store_restarts(self, loses: str, new_node_leads: bool) -> None:
        if loses in ("recent changes", "everything"):
            self.pending = None  # the pending commit is lost together with the data
            self.store.restore(*(self.backup if loses == "recent changes" else (1, {})))
            self.backup = (1, {})
        for name, node in self.nodes.items():
            if loses != "nothing" and (node.has_key or node.alive):
                node.has_key = False
                node.expired_at = self.now
            if loses != "nothing":
                self.store.entries.pop(KEYS.node(name), None)
        for node in self.nodes.values():
            node.listener.reconnected_at = self.now
            self.relist(node.listener)
        if self.size.generation:
            self.store.write(KEYS.size, encode(self.size))
        if new_node_leads and (new_node := self.add_node("")) is not None:
            self.become_leader(new_node)  # the new node knows only the content of the store

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.1, 6.0, 11.0]), settle=st.booleans())
    def time_passes(self, seconds: float, settle: bool) -> None:
        if seconds > RULES.lease:  # no key and no change is delayed for longer than the lease
            for name in [name for name, node in self.nodes.items() if node.alive and not node.has_key]:
                self.restore_key(name)
            for name in [name for name, node in self.nodes.items() if node.alive and node.listener.is_leader()]:
                if self.nodes[name].listener.run.leader.mod_revision == self.store.mod_revision(KEYS.leader):
                    self.receive_node_changes(self.nodes[name].listener, 1000)
        self.now += seconds
        if settle:
            self.everything_settles()

    # -- actions of nodes and leaders

    @rule_for_node(lambda node: node.alive and bool(node.listener.run_changes), count=st.integers(1, 5))
    def a_node_receives_run_changes(self, name: str, count: int) -> None:
        self.receive_run_changes(name, count)

    @rule_for_node(lambda node: node.alive and node.listener.membership is not None, count=st.integers(1, 5))
    def a_leader_receives_node_changes(self, name: str, count: int) -> None:
        self.receive_node_changes(self.nodes[name].listener, count)

    @rule_for_node(is_alive)
    def a_node_lists_the_store_again(self, name: str) -> None:
        self.relist(self.nodes[name].listener)
        self.note_round(name)

    @rule_for_node(lambda node: node.alive and node.listener.membership is not None)
    def a_leader_probes_nodes(self, name: str) -> None:
        self.probe_nodes(self.nodes[name].listener)

    @rule_for_node(lambda node: node.alive and node.has_key and not node.leaving)
    def a_node_becomes_leader(self, name: str) -> None:
        self.become_leader(name)

    @rule_for_node(lambda node: node.alive and node.listener.is_leader())
    def a_leader_decides(self, name: str) -> None:
        self.receive_node_changes(self.nodes[name].listener, 1)
        for _ in range(3):
            if self.nodes[name].listener.is_leader():
                self.decide(name)

    @rule_for_node(lambda node: node.alive and node.listener.is_leader())
    def a_leader_decides_and_is_paused(self, name: str) -> None:
        self.receive_node_changes(self.nodes[name].listener, 1000)
        self.pending = self.decision_of(name)

    @precondition(lambda self: self.pending is not None and self.nodes[self.pending.name].alive)
    @rule()
    def a_paused_leader_commits(self) -> None:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        if not isinstance(pending.decision, (NoticeRecord, Resign)):
            self.commit(pending)

    @initialize(
        topology_keys=st.lists(st.sampled_from(["x", "y"]), min_size=2, max_size=4), notice=st.sampled_from([0.0, 20.0])
    )
    def nodes_start(self, topology_keys: list[str], notice: float) -> None:
        self.requested_notice = notice
        for topology_key in topology_keys:
            self.a_node_joins(topology_key)
        self.everything_settles()
        self.now += 20.0
        self.everything_settles()

    @rule()
    def everything_settles(self) -> None:
        """Deliver all changes to all nodes, and let the leaders act."""
        living = [name for name, node in self.nodes.items() if node.alive]
        for _ in range(5):
            self.now += 0.03
            for name in living:
                self.receive_run_changes(name, 1000)
            leading = [name for name in living if self.nodes[name].listener.is_leader()]
            # Without a leader, the youngest node leads first, so that nodes with less knowledge must resign. A
            # leaving node leads only if there is no other node.
            eligible = [name for name in living if not self.nodes[name].leaving] or living
            for name in leading or [name for name in eligible if not self.nodes[name].resigned][-1:] or eligible[:1]:
                self.become_leader(name)
                self.receive_node_changes(self.nodes[name].listener, 1000)
                self.probe_nodes(self.nodes[name].listener)
                self.decide(name)

    # -- helpers

    def add_node(self, topology_key: str) -> str | None:
        """Add a node, and return its id; None if there are already MAX_NODES live nodes."""
        if sum(node.alive for node in self.nodes.values()) == MAX_NODES:
            return None
        self.created_nodes += 1
        created = record(
            f"n{self.created_nodes}",
            topology_key=topology_key,
            address=f"10.0.0.{self.created_nodes}",
            size=SizeRecord(min=2, max=4),
        )
        name = f"{created.name}.0000"
        self.nodes[name] = Node(created, Listener(self.store, name))
        self.report(name)
        return name

    def report(self, name: str, **changes: Any) -> None:
        node = self.nodes[name]
        node.record = msgspec.structs.replace(node.record, **changes)
        if node.has_key:
            self.store.write(KEYS.node(name), encode(node.record))

    def finish(self, name: str) -> None:
        self.finished.add((name, self.nodes[name].record.round))
        self.report(name, phase=NodePhase.DONE)

    def kill(self, name: str) -> None:
        self.nodes[name].alive = False
        self.nodes[name].may_count_as_lost = True
        self.store.listeners.remove(self.nodes[name].listener)

    def delete_key(self, name: str) -> None:
        self.nodes[name].has_key = False
        self.nodes[name].expired_at = self.now
        self.store.write(KEYS.node(name), None)

    def restore_key(self, name: str) -> None:
        node = self.nodes[name]
        node.has_key = node.reachable = True
        self.report(name, tcp_store_port=node.record.tcp_store_port + 1)

    def relist(self, listener: Listener) -> None:
        listener.run_changes.clear()
        listener.node_changes.clear()
        listener.run.replace(self.store.list_prefix(KEYS.control))
        if listener.membership is not None:
            entries = {entry.key: entry for entry in self.store.list_prefix(KEYS.nodes).entries}
            for name in [name for name in listener.membership.peers if KEYS.node(name) not in entries]:
                self.node_gone(listener, name)
            for entry in entries.values():
                self.node_seen(listener, entry)

    def receive_run_changes(self, name: str, count: int) -> None:
        self.nodes[name].listener.apply_run_changes(count)
        self.note_round(name)

    def note_round(self, name: str) -> None:
        """Let a node note the current round, as :class:`~torchelastic.rendezvous.node.RendezvousNode` does."""
        node = self.nodes[name]
        round = node.listener.run.round
        if round is None or not node.alive:
            return
        if node.known_round is None or (round.number >= node.known_round.number and round != node.known_round):
            node.known_round = round
            self.report(
                name,
                round=round.number,
                restarts=max(round.restarts, node.record.restarts),
                tcp_store_port=node.record.tcp_store_port + 1,
                phase=NodePhase.LEAVING if node.leaving else NodePhase.READY,
                failure=None,
                notice=self.requested_notice if name in round.nodes else 0.0,
                answered_notice=0,
            )

    def receive_node_changes(self, listener: Listener, count: int) -> None:
        for _ in range(min(count, len(listener.node_changes))):
            change = listener.node_changes.popleft()
            if change.entry is None:
                self.node_gone(listener, change.key.removeprefix(KEYS.nodes))
            else:
                self.node_seen(listener, change.entry)

    def node_seen(self, listener: Listener, entry: Entry) -> None:
        assert listener.membership is not None
        name = entry.key.removeprefix(KEYS.nodes)
        node = self.nodes[name]
        listener.membership.note_run(listener.run, now=self.now)
        listener.membership.note_key(name, entry, answers=name == listener.node or (node.alive and node.reachable))

    def node_gone(self, listener: Listener, name: str) -> None:
        assert listener.membership is not None
        node = self.nodes[name]
        peer = listener.membership.note_deleted_key(name)
        if peer is not None and (name == listener.node or (node.alive and node.reachable)):
            listener.membership.expired[name] = peer

    def probe_nodes(self, listener: Listener) -> None:
        """Let a leader note the results of connections and probes."""
        assert listener.membership is not None
        for name, node in self.nodes.items():
            if not node.alive:
                listener.membership.dead.add(name)
            if not (node.alive and node.reachable):
                listener.membership.expired.pop(name, None)
            elif name in listener.membership.peers:
                listener.membership.note_alive(name)

    def become_leader(self, name: str) -> None:
        listener = self.nodes[name].listener
        if listener.is_leader():
            return
        taken = LeaderRecord(node=name, address="10.0.0.1:1")
        revision = self.store.compare_and_swap(KEYS.leader, encode(taken), listener.run.leader.mod_revision)
        if revision is not None:
            if self.now >= listener.reconnected_at + RULES.lease:
                for node in self.nodes.values():
                    node.may_count_as_lost |= not node.has_key  # the new leader cannot know that the node is alive
            listener.run.note(KEYS.leader, taken, revision)
            listener.membership = Membership(RULES.size, changed_at=self.now)
            listener.node_changes.clear()
            for entry in self.store.list_prefix(KEYS.nodes).entries:
                self.node_seen(listener, entry)

    def resign(self, name: str) -> bool:
        listener = self.nodes[name].listener
        listener.membership = None
        resigned = LeaderRecord(node="", address="")
        return self.store.compare_and_swap(KEYS.leader, encode(resigned), listener.run.leader.mod_revision) is not None

    def snapshot(self, name: str) -> Membership:
        node = self.nodes[name]
        assert node.listener.membership is not None
        node.listener.membership.update(
            node.listener.run,
            now=self.now,
            wait_until=node.listener.reconnected_at + RULES.lease,
            remembered=node.known_round,
            resigned=node.resigned,
        )
        return copied(node.listener.membership)

    def decide(self, name: str) -> bool:
        """Let a leader decide and commit; return whether the commit changed the store."""
        return self.commit(self.decision_of(name))

    def decision_of(self, name: str) -> Pending:
        snapshot = self.snapshot(name)
        decision = plan(snapshot, RULES)
        assert decision == plan(snapshot, RULES)
        run = self.nodes[name].listener.run
        if isinstance(decision, OutcomeRecord) and run.leader.mod_revision != self.store.mod_revision(KEYS.leader):
            decision = Hold()  # the leader checks in the store that it still leads
        if isinstance(decision, OutcomeRecord):
            self.check_outcome(decision, snapshot)
        listener = self.nodes[name].listener
        undelivered = {change.key for change in listener.node_changes}
        registered = frozenset(
            other
            for other, node in self.nodes.items()
            if node.alive and node.has_key and (other in snapshot.peers or KEYS.node(other) not in undelivered)
        )
        return Pending(name, snapshot, decision, run.state, registered)

    def commit(self, pending: Pending) -> bool:
        """Carry out a decision, perhaps long after it was made; return whether the store changed."""
        name, snapshot = pending.name, pending.snapshot
        run = self.nodes[name].listener.run
        match pending.decision:
            case RoundRecord() as new:
                if not new.nonce:
                    self.nonces += 1
                    new = msgspec.structs.replace(new, nonce=f"{self.nonces}")
                state = StateRecord(new)
                revision = self.store.compare_and_swap(KEYS.state, encode(state), pending.state.mod_revision)
                if revision is not None:
                    self.check_round(new, pending)
                    self.committed.append(new)
                    run.note(KEYS.state, state, revision)
                    self.note_round(name)
                return revision is not None
            case NoticeRecord() as notice:
                self.check_notice(notice, snapshot)
                revision = self.store.compare_and_swap(KEYS.notice, encode(notice), run.notice.mod_revision)
                if revision is not None:
                    run.note(KEYS.notice, notice, revision)
                return revision is not None
            case OutcomeRecord() as outcome:
                ended = encode(StateRecord(snapshot.round, outcome))
                before = self.store.state
                revision = self.store.compare_and_swap(KEYS.state, ended, pending.state.mod_revision)
                assert revision is None or before == StateRecord(snapshot.round), "the outcome ends another round"
                return revision is not None
            case Resign():
                self.nodes[name].resigned = True
                return self.resign(name)
        return False

    # -- invariants

    def check_round(self, new: RoundRecord, pending: Pending) -> None:
        snapshot = pending.snapshot
        if new == snapshot.remembered:
            return  # the leader restores the round to a store that lost it
        rounds = [node.known_round for node in self.nodes.values() if node.alive] + [snapshot.round]
        known = max((round.number for round in rounds if round is not None), default=0)
        self.committed = [round for round in self.committed if round.number <= known]  # forget rounds unknown to nodes
        self.check_number(new, pending.registered)
        assert snapshot.outcome is None
        assert len(set(new.nodes)) == len(new.nodes)
        assert not new.members or snapshot.size.min <= len(new.members) <= snapshot.size.max
        for node in new.nodes:
            assert node in snapshot.peers
            assert node not in snapshot.dead
            assert not snapshot.is_leaving(node)
            assert snapshot.peers[node].record.name not in snapshot.size.draining
        self.check_missing_members(new, snapshot)
        self.check_restarts_charged(new, snapshot)
        if new.members:
            present = {node for node in snapshot.ranks if node in snapshot.peers and node not in snapshot.dead}
            staying = {
                node
                for node in present
                if not snapshot.is_leaving(node) and snapshot.peers[node].record.name not in snapshot.size.draining
            }
            assert staying <= set(new.nodes) or len(new.nodes) == snapshot.size.target, "a member is left out"
            assert new.tcp_store not in {old.tcp_store for old in self.committed}
            assert new.tcp_store.rpartition(":")[0] in {member.address for member in new.members}
        if new.reason is RoundReason.NODE_LOST and self.committed and snapshot.round is not None:
            assert new.number > snapshot.round.number + 1 or any(map(self.may_be_lost, snapshot.ranks))
        survivors = [node for node in snapshot.ranks if node in new.nodes]
        assert [node for node in new.nodes if node in survivors] == survivors
        self.check_neighbours(new, snapshot)
        self.check_notice_given(snapshot)

    def check_missing_members(self, new: RoundRecord, snapshot: Membership) -> None:
        """Check that no node joins while a member has no key.

        After a store outage, check that only a resize starts a round.
        """
        if (
            snapshot.round is None
            or snapshot.highest_round_seen > snapshot.round.number
            or not snapshot.incomplete
            or not new.members
        ):
            return
        assert new.reason is not RoundReason.NODE_JOINED
        assert snapshot.now >= snapshot.wait_until or new.reason is RoundReason.RESIZED

    def check_restarts_charged(self, new: RoundRecord, snapshot: Membership) -> None:
        """Check that only failures are charged, once each, and that no node joins a run that is finishing."""
        if snapshot.round is None or not snapshot.round.members or snapshot.highest_round_seen > snapshot.round.number:
            return
        if new.reason is RoundReason.WORKER_FAILED:
            assert new.restarts == snapshot.round.restarts + 1
        elif any(snapshot.is_present(node) and not snapshot.is_leaving(node) for node in snapshot.ranks):
            assert new.restarts == snapshot.round.restarts
        # A run without remaining members starts over, so new nodes may join at once.
        stays = any(snapshot.is_present(node) or snapshot.may_return(node) for node in snapshot.ranks)
        if new.reason is RoundReason.NODE_JOINED and stays and not any(map(snapshot.is_leaving, snapshot.ranks)):
            assert not any(map(snapshot.is_finishing, set(snapshot.ranks) - snapshot.dead))

    def may_be_lost(self, name: str) -> bool:
        node = self.nodes[name]
        return node.may_count_as_lost or (not node.has_key and self.now >= node.expired_at + RULES.lease)

    def check_number(self, new: RoundRecord, registered: frozenset[str]) -> None:
        """Check that no node known to the leader has a round with this number or a higher one."""
        for name, node in self.nodes.items():
            if node.alive and node.has_key and node.known_round is not None and node.known_round.number >= new.number:
                assert name not in registered, name
                assert name not in new.nodes, name

    def check_neighbours(self, new: RoundRecord, snapshot: Membership) -> None:
        """Check that a new node is next to another node with its topology key, if the round has such a node."""
        topology_keys = [snapshot.peers[node].record.topology_key for node in new.nodes]
        for rank, node in enumerate(new.nodes):
            if node not in snapshot.ranks and topology_keys[rank] and topology_keys.count(topology_keys[rank]) > 1:
                assert topology_keys[rank] in (topology_keys[rank - 1 : rank] + topology_keys[rank + 1 : rank + 2])

    def check_notice_given(self, snapshot: Membership) -> None:
        if snapshot.round is None or any(peer.record.failure is not None for peer in snapshot.peers.values()):
            return
        present = [
            snapshot.peers[node] for node in snapshot.ranks if node in snapshot.peers and node not in snapshot.dead
        ]
        if len(present) < len(snapshot.ranks) or any(peer.record.phase is NodePhase.PARTITIONED for peer in present):
            return
        asking = [
            peer.record
            for peer in present
            if peer.record.notice
            and peer.record.round == snapshot.round.number
            and peer.record.phase is not NodePhase.DONE
        ]
        if asking and not any(peer.record.round > snapshot.round.number for peer in snapshot.peers.values()):
            notice = snapshot.current_notice
            assert notice is not None
            is_over = snapshot.now >= snapshot.noticed_at + notice.seconds
            assert is_over or all(each.answered_notice >= notice.number for each in asking)

    def check_notice(self, notice: NoticeRecord, snapshot: Membership) -> None:
        assert snapshot.round is not None
        assert notice.round == snapshot.round.number
        assert 0 <= notice.seconds <= RULES.notice
        last = 0 if snapshot.notice is None else snapshot.notice.number
        assert notice.number > last if notice.seconds else notice.number == last

    def check_outcome(self, outcome: OutcomeRecord, snapshot: Membership) -> None:
        round = snapshot.round
        assert round is not None
        assert outcome.round == round.number
        if outcome.state is OutcomeState.SUCCEEDED:
            assert all((name, round.number) in self.finished for name in round.nodes)
        else:
            assert outcome.failure is not None
            assert outcome.failure.node in self.final

    @invariant()
    def no_failure_is_charged_twice(self) -> None:
        round = self.store.round
        assert round is None or round.restarts <= self.failures

    # -- after the faults

    def teardown(self) -> None:
        """Check that as many live nodes as permitted train after the faults, and that the leader plans no change."""
        for name in [name for name, node in self.nodes.items() if node.alive and node.leaving]:
            self.kill(name)
        for name, node in self.nodes.items():
            node.reachable = True
            if node.has_key and not node.alive:
                self.delete_key(name)
            elif node.alive and not node.has_key:
                self.restore_key(name)
        for _ in range(20):
            self.now += 15.0
            self.everything_settles()
            for node in [node for node in self.nodes.values() if self.is_finishing_run() and is_training(node)]:
                self.finish(node.listener.node)
        living = [name for name, node in self.nodes.items() if node.alive]
        if self.store.outcome is None and living:
            self.check_final_state(living)

    def is_finishing_run(self) -> bool:
        """Return whether a leader knows of a member whose worker has exited with 0."""
        views = [self.snapshot(name) for name, node in self.nodes.items() if node.alive and node.listener.is_leader()]
        return any(any(map(snapshot.is_finishing, snapshot.ranks)) for snapshot in views)

    def check_final_state(self, living: list[str]) -> None:
        (leader,) = [name for name in living if self.nodes[name].listener.is_leader()]
        assert isinstance(plan(self.snapshot(leader), RULES), Hold)
        snapshot = self.snapshot(leader)
        assert snapshot.current_notice is None or not set(snapshot.ranks).intersection(living)
        size = snapshot.size
        fit = [name for name in living if self.nodes[name].record.name not in size.draining]
        round = self.store.round
        if len(fit) >= size.min:
            assert round is not None
            assert len(round.members) == min(len(fit), size.target)
        elif round is not None:
            assert not set(round.nodes) & set(living)
        for name in living:
            assert self.nodes[name].known_round == round
            assert self.nodes[name].record.failure is None


TestRendezvousModel = RendezvousModel.TestCase
TestRendezvousModel.settings = hypothesis_settings(stateful_step_count=50)


def test_node_without_the_lost_round_receives_the_round_without_members() -> None:
    model = RendezvousModel()
    model.nodes_start(topology_keys=["", ""], notice=0.0)
    n1, n2 = model.nodes
    model.report(n1, phase=NodePhase.READY, failure=failure("n1", number=1))
    model.become_leader(n1)
    model.receive_node_changes(model.nodes[n1].listener, 1000)
    assert model.decide(n1)
    model.report(n1, phase=NodePhase.LEAVING)
    model.the_store_restarts(loses="everything", new_node_leads=False)
    for _ in range(4):
        model.time_passes(seconds=6.0, settle=True)
    assert (known_round := model.nodes[n2].known_round) is not None
    assert (known_round.number, known_round.members) == (3, ())
