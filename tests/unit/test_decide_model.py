"""Whatever happens to nodes, links, leases, events and the store, in whatever order, the rendezvous keeps its promises.

The store, the nodes and the leaders are played; what a leader makes of what it sees, and what it decides, is the real
thing. There may be several who take themselves for the leader, and each hears of the store's changes late, in pieces,
and again.
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
from torchelastic.contract import (
    EpochReason,
    EpochRecord,
    FailureKind,
    LeaderRecord,
    NodePhase,
    NodeRecord,
    NoticeRecord,
    OutcomeRecord,
    OutcomeState,
    RunKeys,
    SizeRecord,
    decode,
    decode_epoch,
    encode,
)
from torchelastic.rendezvous import notices
from torchelastic.rendezvous.control import Control
from torchelastic.rendezvous.decide import decide
from torchelastic.rendezvous.roster import Roster
from torchelastic.rendezvous.view import EndRun, FormEpoch, GiveNotice, GiveWay, Hold, View
from torchelastic.store import MemoryStore
from torchelastic.store.api import Change, Entry

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NODES = 6
KEYS = RunKeys.of("run")
RULES = dataclasses.replace(SETTINGS, max_restarts=1000, early_failures=1000, join_timeout=1e9)


class PlayedStore:
    """etcd as far as it matters here: revisions, compare-and-swap, and changes that each listener hears in order."""

    def __init__(self) -> None:
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.listeners: list[Listener] = []

    def write(self, key: str, value: bytes | None) -> int:
        self.revision += 1
        before = self.entries.pop(key, None)
        if value is not None:
            created = self.revision if before is None else before.created
            self.entries[key] = Entry(key, value, created, self.revision)
        elif before is None:
            return self.revision
        for listener in self.listeners:
            listener.hear(Change(key, self.entries.get(key), self.revision))
        return self.revision

    def swap(self, key: str, value: bytes, expected: int) -> int | None:
        return self.write(key, value) if self.modified(key) == expected else None

    def modified(self, key: str) -> int:
        return self.entries[key].modified if key in self.entries else 0

    def below(self, prefix: str) -> list[Entry]:
        return [entry for key, entry in self.entries.items() if key.startswith(prefix)]

    def go_back(self, revision: int, entries: dict[str, Entry]) -> None:
        """Be what it was; whoever listens has to read it anew."""
        self.revision = revision
        self.entries = entries.copy()

    @property
    def epoch(self) -> EpochRecord | None:
        entry = self.entries.get(KEYS.epoch)
        return None if entry is None else decode_epoch(entry.value)

    @property
    def notice(self) -> NoticeRecord | None:
        entry = self.entries.get(KEYS.notice)
        return None if entry is None else decode(entry.value, NoticeRecord)

    @property
    def outcome(self) -> OutcomeRecord | None:
        entry = self.entries.get(KEYS.outcome)
        return None if entry is None else decode(entry.value, OutcomeRecord)


class Listener:
    """One node's sight of the store: what it was told, and what is on its way to it."""

    def __init__(self, store: PlayedStore, node: str) -> None:
        self.store = store
        self.node = node
        self.control = Control(MemoryStore(), KEYS)
        self.roster: Roster | None = None
        self.of_the_run: deque[Change] = deque()
        self.of_nodes: deque[Change] = deque()
        self.back_at = -1e9
        store.listeners.append(self)
        self.control._replace(store.below(KEYS.control))

    def hear(self, change: Change) -> None:
        (self.of_nodes if change.key.startswith(KEYS.nodes) else self.of_the_run).append(change)

    def take_in_of_the_run(self, count: int) -> None:
        for _ in range(min(count, len(self.of_the_run))):
            change = self.of_the_run.popleft()
            if change.revision > self.control._modified(change.key):
                self.control._set(change.key, change.entry)

    def leads(self) -> bool:
        leader = self.control.leader.record
        return self.roster is not None and leader is not None and leader.node == self.node


@dataclasses.dataclass
class Node:
    """A node, with what it knows itself."""

    record: NodeRecord
    listener: Listener
    alive: bool = True
    key: bool = True
    linked: bool = True
    gave_way: bool = False
    told: EpochRecord | None = None
    keyless_since: float = 0.0
    excused: bool = False
    """Whether it may have been taken for lost: dead, cut off, or not answering when its lease had ended."""

    @property
    def leaving(self) -> bool:
        return self.record.phase is NodePhase.LEAVING


def about(fit: Callable[[Node], bool], **strategies: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """A rule about one node of those for which something holds."""

    def decorate(happen: Callable[..., None]) -> Any:
        def choose(self: Run, data: st.DataObject, **drawn: Any) -> None:
            happen(self, data.draw(st.sampled_from([name for name, node in self.nodes.items() if fit(node)])), **drawn)

        choose.__name__ = happen.__name__
        possible = precondition(lambda self: any(map(fit, self.nodes.values())))
        return possible(rule(data=st.data(), **strategies)(choose))

    return decorate


def lives(node: Node) -> bool:
    return node.alive


def trains(node: Node) -> bool:
    told, phase = node.told, node.record.phase
    return node.alive and told is not None and node.listener.node in told.nodes and phase is not NodePhase.CUT_OFF


def runs_well(node: Node) -> bool:
    return trains(node) and node.record.failure is None


class Run(RuleBasedStateMachine):
    """A handful of nodes, a store that can lose its data, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0
        self.store = PlayedStore()
        self.nodes: dict[str, Node] = {}
        self.born = 0
        self.size = SizeRecord(min=2, max=4)
        self.committed: list[EpochRecord] = []
        self.asks = 0.0
        self.failures = 0
        self.final: set[str] = set()
        self.finished: set[tuple[str, int]] = set()
        self.backup: tuple[int, dict[str, Entry]] = (1, {})

    # -- what happens to nodes

    @rule(place=st.sampled_from(["", "x", "y"]))
    def a_node_joins(self, place: str) -> None:
        self.comes(place)

    @about(lambda node: node.alive and node.record.phase is not NodePhase.DONE)
    def a_node_leaves(self, name: str) -> None:
        self.says(name, phase=NodePhase.LEAVING)
        if self.nodes[name].listener.leads():
            self.resigns(name)

    @about(lambda node: node.alive and node.leaving)
    def a_node_that_leaves_is_gone(self, name: str) -> None:
        self.dies(name)
        self.loses_its_key(name)

    @about(lives)
    def a_node_dies(self, name: str) -> None:
        self.dies(name)

    @about(lambda node: node.key and not node.alive)
    def the_lease_of_a_dead_node_ends(self, name: str) -> None:
        self.loses_its_key(name)

    @about(lambda node: node.alive and node.key, linked=st.booleans())
    def a_lease_ends_though_its_node_lives(self, name: str, linked: bool) -> None:
        self.nodes[name].linked = linked
        self.nodes[name].excused |= not linked
        self.loses_its_key(name)

    @about(lambda node: node.alive and not node.key)
    def a_node_puts_its_key_again(self, name: str) -> None:
        self.comes_back(name)

    @about(lambda node: runs_well(node) and node.record.phase is NodePhase.READY, answers=st.booleans())
    def a_member_is_cut_off_for_a_while(self, name: str, answers: bool) -> None:
        self.nodes[name].linked = answers
        self.nodes[name].excused = True
        self.says(name, phase=NodePhase.CUT_OFF)

    # -- what happens to workers

    @about(runs_well, kind=st.sampled_from(list(FailureKind)), final=st.sampled_from([False] * 19 + [True]))
    def a_worker_fails(self, name: str, kind: FailureKind, final: bool) -> None:
        node = self.nodes[name]
        broken = failure(node.record.name, number=node.record.epoch, kind=kind)
        self.failures += 1
        if final:
            self.final.add(name)
        self.says(name, failure=msgspec.structs.replace(broken, final=final))

    @about(runs_well)
    def the_workers_of_a_node_end_with_0(self, name: str) -> None:
        self.is_done(name)

    @about(trains, seconds=st.sampled_from([1.0, 20.0, 500.0]))
    def workers_ask_for_a_notice(self, name: str, seconds: float) -> None:
        self.says(name, notice=seconds)

    @about(lambda node: trains(node) and node.record.notice > 0 and node.listener.control.notice.record is not None)
    def workers_have_saved(self, name: str) -> None:
        notice = self.nodes[name].listener.control.notice.record
        assert notice is not None
        if notice.epoch == self.nodes[name].record.epoch:
            self.says(name, saved=notice.serial)

    # -- what happens to the run and the store

    @rule(low=st.integers(1, 3), more=st.integers(0, 3), wanted=st.none() | st.integers(0, 7))
    def the_size_changes(self, low: int, more: int, wanted: int | None) -> None:
        going = tuple(sorted(node.record.name for node in self.nodes.values() if node.alive)[:1]) if wanted == 1 else ()
        self.size = SizeRecord(min=low, max=low + more, wanted=wanted, going=going, generation=self.size.generation + 1)
        self.store.write(KEYS.size, encode(self.size))

    @rule()
    def the_store_is_backed_up(self) -> None:
        self.backup = (self.store.revision, self.store.entries.copy())

    @rule(loses=st.sampled_from(["nothing", "leases", "what is new", "everything"]), newcomer_leads=st.booleans())
    def the_store_is_started_again(self, loses: str, newcomer_leads: bool) -> None:
        if loses in ("what is new", "everything"):
            self.store.go_back(*(self.backup if loses == "what is new" else (1, {})))
            self.backup = (1, {})
        for name, node in self.nodes.items():
            if loses != "nothing" and (node.key or node.alive):
                node.key = False
                node.keyless_since = self.now
            if loses != "nothing":
                self.store.entries.pop(KEYS.node(name), None)
        for node in self.nodes.values():
            node.listener.back_at = self.now
            self.relist(node.listener)
        if self.size.generation:
            self.store.write(KEYS.size, encode(self.size))
        if newcomer_leads and (newcomer := self.comes("")) is not None:
            self.leads(newcomer)  # and knows of nothing but what the store has kept

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.1, 6.0, 11.0]), calm=st.booleans())
    def time_passes(self, seconds: float, calm: bool) -> None:
        if seconds > RULES.lease:  # for so long, nothing is late that can come
            for name in [name for name, node in self.nodes.items() if node.alive and not node.key]:
                self.comes_back(name)
            for name in [name for name, node in self.nodes.items() if node.alive and node.listener.leads()]:
                if self.is_fresh(self.nodes[name].listener.control):
                    self.hears_of_nodes(self.nodes[name].listener, 1000)
        self.now += seconds
        if calm:
            self.things_take_their_course()

    # -- what nodes and leaders hear and do

    @about(lambda node: node.alive and bool(node.listener.of_the_run), count=st.integers(1, 5))
    def a_node_hears_of_the_run(self, name: str, count: int) -> None:
        self.hears_of_the_run(name, count)

    @about(lambda node: node.alive and node.listener.roster is not None, count=st.integers(1, 5))
    def a_leader_hears_of_nodes(self, name: str, count: int) -> None:
        self.hears_of_nodes(self.nodes[name].listener, count)

    @about(lives)
    def a_node_reads_everything_again(self, name: str) -> None:
        self.relist(self.nodes[name].listener)
        self.takes_note(name)

    @about(lambda node: node.alive and node.listener.roster is not None)
    def a_leader_looks_at_those_who_do_not_answer(self, name: str) -> None:
        self.looks(self.nodes[name].listener)

    @about(lambda node: node.alive and node.key and not node.leaving)
    def a_node_takes_the_lead(self, name: str) -> None:
        self.leads(name)

    @about(lambda node: node.alive and node.listener.leads())
    def a_leader_decides(self, name: str) -> None:
        self.hears_of_nodes(self.nodes[name].listener, 1)
        for _ in range(3):
            if self.nodes[name].listener.leads():
                self.decides(name)

    @initialize(
        places=st.lists(st.sampled_from(["x", "y"]), min_size=2, max_size=4), notice=st.sampled_from([0.0, 20.0])
    )
    def nodes_meet(self, places: list[str], notice: float) -> None:
        self.asks = notice
        for place in places:
            self.a_node_joins(place)
        self.things_take_their_course()
        self.now += 20.0
        self.things_take_their_course()

    @rule()
    def things_take_their_course(self) -> None:
        """All hear of everything, and whoever leads does what there is to be done."""
        living = [name for name, node in self.nodes.items() if node.alive]
        for _ in range(5):
            self.now += 0.03
            for name in living:
                self.hears_of_the_run(name, 1000)
            leading = [name for name in living if self.nodes[name].listener.leads()]
            # Where nobody leads, the youngest is the first to take it: so those who know least have to give way. Who
            # leaves does not lead any more, as long as there is anybody else.
            heirs = [name for name in living if not self.nodes[name].leaving] or living
            for name in leading or [name for name in heirs if not self.nodes[name].gave_way][-1:] or heirs[:1]:
                self.leads(name)
                self.hears_of_nodes(self.nodes[name].listener, 1000)
                self.looks(self.nodes[name].listener)
                self.decides(name)

    # -- how it happens

    def comes(self, place: str) -> str | None:
        """The id of a new node; None where there are as many as there may be."""
        if sum(node.alive for node in self.nodes.values()) == MAX_NODES:
            return None
        self.born += 1
        said = record(f"n{self.born}", place=place, address=f"10.0.0.{self.born}", size=SizeRecord(min=2, max=4))
        name = f"{said.name}.0000"
        self.nodes[name] = Node(said, Listener(self.store, name))
        self.says(name)
        return name

    def says(self, name: str, **changes: Any) -> None:
        node = self.nodes[name]
        node.record = msgspec.structs.replace(node.record, **changes)
        if node.key:
            self.store.write(KEYS.node(name), encode(node.record))

    def is_done(self, name: str) -> None:
        self.finished.add((name, self.nodes[name].record.epoch))
        self.says(name, phase=NodePhase.DONE)

    def dies(self, name: str) -> None:
        self.nodes[name].alive = False
        self.nodes[name].excused = True
        self.store.listeners.remove(self.nodes[name].listener)

    def loses_its_key(self, name: str) -> None:
        self.nodes[name].key = False
        self.nodes[name].keyless_since = self.now
        self.store.write(KEYS.node(name), None)

    def comes_back(self, name: str) -> None:
        self.nodes[name].key = self.nodes[name].linked = True
        self.says(name)

    def relist(self, listener: Listener) -> None:
        listener.of_the_run.clear()
        listener.of_nodes.clear()
        listener.control._replace(self.store.below(KEYS.control))
        if listener.roster is not None:
            entries = {entry.key: entry for entry in self.store.below(KEYS.nodes)}
            for name in [name for name in listener.roster.peers if KEYS.node(name) not in entries]:
                self.is_gone(listener, name)
            for entry in entries.values():
                self.is_seen(listener, entry)

    def hears_of_the_run(self, name: str, count: int) -> None:
        self.nodes[name].listener.take_in_of_the_run(count)
        self.takes_note(name)

    def takes_note(self, name: str) -> None:
        """A node is told of an epoch, as :class:`~torchelastic.rendezvous.node.RendezvousNode` tells it."""
        node = self.nodes[name]
        epoch = node.listener.control.epoch.record
        if epoch is None or not node.alive:
            return
        if node.told is None or (epoch.number >= node.told.number and epoch != node.told):
            node.told = epoch
            self.says(
                name,
                epoch=epoch.number,
                restarts=max(epoch.restarts, node.record.restarts),
                store=node.record.store + 1,
                phase=NodePhase.LEAVING if node.leaving else NodePhase.READY,
                failure=None,
                notice=self.asks if name in epoch.nodes else 0.0,
                saved=0,
            )

    def hears_of_nodes(self, listener: Listener, count: int) -> None:
        for _ in range(min(count, len(listener.of_nodes))):
            change = listener.of_nodes.popleft()
            if change.entry is None:
                self.is_gone(listener, change.key.removeprefix(KEYS.nodes))
            else:
                self.is_seen(listener, change.entry)

    def is_seen(self, listener: Listener, entry: Entry) -> None:
        assert listener.roster is not None
        name = entry.key.removeprefix(KEYS.nodes)
        node = self.nodes[name]
        listener.roster.saw(entry, now=self.now, answers=name == listener.node or (node.alive and node.linked))

    def is_gone(self, listener: Listener, name: str) -> None:
        assert listener.roster is not None
        node = self.nodes[name]
        if listener.roster.gone(name) is not None and (name == listener.node or (node.alive and node.linked)):
            listener.roster.keep_silent(name)

    def looks(self, listener: Listener) -> None:
        """What links, and a second look where they broke, show a leader sooner or later."""
        assert listener.roster is not None
        for name, node in self.nodes.items():
            if not node.alive:
                listener.roster.died(name)
            if not (node.alive and node.linked):
                listener.roster.end_silence(name)
            elif name in listener.roster.peers:
                listener.roster.answers(name)

    def leads(self, name: str) -> None:
        listener = self.nodes[name].listener
        if listener.leads():
            return
        taken = LeaderRecord(node=name, address="10.0.0.1:1")
        revision = self.store.swap(KEYS.leader, encode(taken), listener.control.leader.modified)
        if revision is not None:
            if self.now >= listener.back_at + RULES.lease:
                for node in self.nodes.values():
                    node.excused |= not node.key  # there is nothing by which this leader could tell that it lives
            listener.control.set_leader(taken, revision)
            listener.roster = Roster(name, listener.control, KEYS, self.nodes[name].record.size)
            listener.of_nodes.clear()
            for entry in self.store.below(KEYS.nodes):
                self.is_seen(listener, entry)

    def resigns(self, name: str) -> bool:
        listener = self.nodes[name].listener
        listener.roster = None
        resigned = LeaderRecord(node="", address="")
        return self.store.swap(KEYS.leader, encode(resigned), listener.control.leader.modified) is not None

    def view(self, name: str) -> View:
        node = self.nodes[name]
        assert node.listener.roster is not None
        return node.listener.roster.view(
            now=self.now,
            patient_until=node.listener.back_at + RULES.lease,
            remembered=node.told,
            gave_way=node.gave_way,
        )

    def decides(self, name: str) -> bool:
        """Have a leader decide once, and carry it out; whether anything came of it."""
        control = self.nodes[name].listener.control
        view = self.view(name)
        decision = decide(view, RULES)
        assert decision == decide(view, RULES)
        match decision:
            case FormEpoch(record=new) if control.epoch.modified or self.is_fresh(control):
                revision = self.store.swap(KEYS.epoch, encode(new), control.epoch.modified)
                if revision is not None:
                    self.check_epoch(new, view)
                    self.committed.append(new)
                    control.set_epoch(new, revision)
                    self.takes_note(name)
                return revision is not None
            case GiveNotice(record=notice):
                self.check_notice(notice, view)
                revision = self.store.swap(KEYS.notice, encode(notice), control.notice.modified)
                if revision is not None:
                    control.set_notice(notice, revision)
                return revision is not None
            case EndRun(record=outcome) if self.is_fresh(control):
                self.check_outcome(outcome)
                return self.store.swap(KEYS.outcome, encode(outcome), control.outcome.modified) is not None
            case GiveWay() if self.is_fresh(control):
                self.nodes[name].gave_way = True
                return self.resigns(name)
        return False

    def is_fresh(self, control: Control) -> bool:
        of_leader, of_epoch = self.store.modified(KEYS.leader), self.store.modified(KEYS.epoch)
        return (control.leader.modified, control.epoch.modified) == (of_leader, of_epoch)

    # -- what must hold

    def check_epoch(self, new: EpochRecord, view: View) -> None:
        if new == view.remembered:
            return  # a store that had lost it is given it again
        told = [node.told for node in self.nodes.values() if node.alive] + [view.epoch]
        known = max((epoch.number for epoch in told if epoch is not None), default=0)
        self.committed = [epoch for epoch in self.committed if epoch.number <= known]  # else nobody knows of it
        self.check_number(new)
        assert view.outcome is None
        assert len(set(new.nodes)) == len(new.nodes)
        assert not new.members or view.size.min <= len(new.members) <= view.size.max
        for node in new.nodes:
            assert node in view.peers
            assert node not in view.dead
            assert not view.leaves(node)
            assert view.peers[node].record.name not in view.size.going
        self.check_who_is_left_out(new, view)
        self.check_what_it_costs(new, view)
        if new.members:
            here = {node for node in view.ranks if node in view.peers and node not in view.dead}
            staying = {
                node for node in here if not view.leaves(node) and view.peers[node].record.name not in view.size.going
            }
            assert staying <= set(new.nodes) or len(new.nodes) == view.size.target, "a member is left out"
            assert new.store not in {old.store for old in self.committed}
            assert new.store.rpartition(":")[0] in {member.address for member in new.members}
        if new.reason is EpochReason.NODE_LOST and self.committed and view.epoch is not None:
            assert new.number > view.epoch.number + 1 or any(map(self.may_be_lost, view.ranks))
        survivors = [node for node in view.ranks if node in new.nodes]
        assert [node for node in new.nodes if node in survivors] == survivors
        self.check_neighbours(new, view)
        self.check_that_those_who_asked_were_told(view)

    def check_who_is_left_out(self, new: EpochRecord, view: View) -> None:
        """Whose key is on its way back is waited for by newcomers, and by all where the store itself was away."""
        if view.epoch is None or view.known > view.epoch.number or not view.incomplete or not new.members:
            return
        assert new.reason is not EpochReason.NODE_JOINED
        assert view.now >= view.patient_until or new.reason is EpochReason.RESIZED

    def check_what_it_costs(self, new: EpochRecord, view: View) -> None:
        """A failure is charged once, a change of membership is free, and nobody joins a run that is about to finish."""
        if view.epoch is None or not view.epoch.members or view.known > view.epoch.number:
            return
        if new.reason is EpochReason.WORKER_FAILED:
            assert new.restarts == view.epoch.restarts + 1
        elif any(node in view.peers and node not in view.dead and not view.leaves(node) for node in view.ranks):
            assert new.restarts == view.epoch.restarts
        if new.reason is EpochReason.NODE_JOINED and not any(map(view.leaves, view.ranks)):
            assert not any(map(view.finishing, set(view.ranks) - view.dead))

    def may_be_lost(self, name: str) -> bool:
        node = self.nodes[name]
        return node.excused or (not node.key and self.now >= node.keyless_since + RULES.lease)

    def check_number(self, new: EpochRecord) -> None:
        """No number stands for two epochs as long as anybody is there who knew the first one."""
        for name, node in self.nodes.items():
            assert not (node.alive and node.key) or node.told is None or node.told.number < new.number, name

    def check_neighbours(self, new: EpochRecord, view: View) -> None:
        """A newcomer stands beside one of its own place, where there is any other in the epoch."""
        places = [view.peers[node].record.place for node in new.nodes]
        for rank, node in enumerate(new.nodes):
            if node not in view.ranks and places[rank] and places.count(places[rank]) > 1:
                assert places[rank] in (places[rank - 1 : rank] + places[rank + 1 : rank + 2])

    def check_that_those_who_asked_were_told(self, view: View) -> None:
        if view.epoch is None or any(peer.record.failure is not None for peer in view.peers.values()):
            return
        here = [view.peers[node] for node in view.ranks if node in view.peers and node not in view.dead]
        if len(here) < len(view.ranks) or any(peer.record.phase is NodePhase.CUT_OFF for peer in here):
            return
        asking = [
            peer.record
            for peer in here
            if peer.record.notice and peer.record.epoch == view.epoch.number and peer.record.phase is not NodePhase.DONE
        ]
        if asking and not any(peer.record.epoch > view.epoch.number for peer in view.peers.values()):
            notice = notices.standing(view)
            assert notice is not None
            over = view.now >= view.noticed_at + notice.seconds
            assert over or all(said.saved >= notice.serial for said in asking)

    def check_notice(self, notice: NoticeRecord, view: View) -> None:
        assert view.epoch is not None
        assert notice.epoch == view.epoch.number
        assert 0 <= notice.seconds <= RULES.notice
        last = 0 if view.notice is None else view.notice.serial
        assert notice.serial > last if notice.seconds else notice.serial == last

    def check_outcome(self, outcome: OutcomeRecord) -> None:
        epoch = self.store.epoch
        assert epoch is not None
        assert outcome.epoch == epoch.number
        if outcome.state is OutcomeState.SUCCEEDED:
            assert all((name, epoch.number) in self.finished for name in epoch.nodes)
        else:
            assert outcome.failure is not None
            assert outcome.failure.node in self.final

    @invariant()
    def no_failure_is_charged_twice(self) -> None:
        epoch = self.store.epoch
        assert epoch is None or epoch.restarts <= self.failures

    # -- and in the end

    def teardown(self) -> None:
        """Once the faults stop, whoever lives trains together, and then nothing changes any more."""
        for name in [name for name, node in self.nodes.items() if node.alive and node.leaving]:
            self.dies(name)
        for name, node in self.nodes.items():
            node.linked = True
            if node.key and not node.alive:
                self.loses_its_key(name)
            elif node.alive and not node.key:
                self.comes_back(name)
        for _ in range(20):
            self.now += 15.0
            self.things_take_their_course()
            for node in [node for node in self.nodes.values() if self.is_about_to_finish() and trains(node)]:
                self.is_done(node.listener.node)
        living = [name for name, node in self.nodes.items() if node.alive]
        if self.store.outcome is None and living:
            self.check_the_end(living)

    def is_about_to_finish(self) -> bool:
        """Whether a worker has ended with 0; whoever is not done yet will be."""
        views = [self.view(name) for name, node in self.nodes.items() if node.alive and node.listener.leads()]
        return any(any(map(view.finishing, view.ranks)) for view in views)

    def check_the_end(self, living: list[str]) -> None:
        (leader,) = [name for name in living if self.nodes[name].listener.leads()]
        assert isinstance(decide(self.view(leader), RULES), Hold)
        assert notices.standing(self.view(leader)) is None or not set(self.view(leader).ranks).intersection(living)
        size = self.view(leader).size
        fit = [name for name in living if self.nodes[name].record.name not in size.going]
        epoch = self.store.epoch
        if len(fit) >= size.min:
            assert epoch is not None
            assert len(epoch.members) == min(len(fit), size.target)
        elif epoch is not None:
            assert not set(epoch.nodes) & set(living)
        for name in living:
            assert self.nodes[name].told == epoch
            assert self.nodes[name].record.failure is None


TestRun = Run.TestCase
TestRun.settings = hypothesis_settings(stateful_step_count=50)
