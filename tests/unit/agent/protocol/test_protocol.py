"""The records in the store and the termination message: versions, bounds and invalid Unicode."""

from __future__ import annotations

import msgspec
import pytest

from torchelastic.errors import MalformedRecord
from torchelastic.protocol.codec import LogLimit, decode, decode_same_version, decode_state, encode
from torchelastic.protocol.keys import run_lease
from torchelastic.protocol.pod import TerminationMessage, encode_termination_message
from torchelastic.protocol.records import (
    PROTOCOL_VERSION,
    FailureRecord,
    LeaderRecord,
    Member,
    NodeRecord,
    OutcomeRecord,
    OutcomeState,
    RoundRecord,
    SizeRecord,
    StateRecord,
)

OTHER = PROTOCOL_VERSION + 1
SIZE = SizeRecord(min=1, max=2)


@pytest.mark.parametrize(
    "data",
    [
        encode(SIZE),
        encode(RoundRecord(number=1)),
        encode(LeaderRecord(node="a", address="b:1")),
        encode(NodeRecord(name="a", address="b", workers=1, size=SIZE)),
        encode_termination_message(TerminationMessage(reason="BadInput", message="x" * 10_000)),
    ],
)
def test_every_record_has_the_protocol_version(data: bytes) -> None:
    assert msgspec.json.decode(data)["protocol"] == PROTOCOL_VERSION


def test_a_round_is_decoded_with_and_without_a_failure() -> None:
    round = RoundRecord(number=7, members=(Member("a.1", "10.0.0.1", 2),), tcp_store="10.0.0.1:4000", restarts=3)
    assert decode_state(encode(StateRecord(round))) == StateRecord(round)
    failure = FailureRecord(round=6, rank=2, local_rank=0, node="a.1", exit_code=-9)
    round = RoundRecord(number=7, restarts=1, failure=failure)
    assert decode_state(encode(StateRecord(round))).round == round
    bare = decode_state(b'{"round":{"number":7,"members":[],"restarts":1}}').round
    assert bare is not None
    assert bare.failure is None


def test_a_round_with_too_few_roles_is_malformed() -> None:
    members = tuple(Member(node, "10.0.0.1", 2) for node in ("a.1", "b.1"))
    round = RoundRecord(number=7, members=members, roles=("trainer", "evaluator"))
    assert decode(encode(round), RoundRecord) == round
    with pytest.raises(MalformedRecord, match="each member needs a role"):
        decode(encode(round).replace(b',"evaluator"', b""), RoundRecord)


def test_only_the_number_of_a_round_of_another_version_is_decoded() -> None:
    record = b'{"round":{"number":7,"protocol":%d,"members":"in another form","store":4},"outcome":%s}'
    outcome = OutcomeRecord(OutcomeState.FAILED, round=7, message="it broke")
    state = decode_state(record % (OTHER, encode(outcome)))
    assert state.outcome == outcome
    round = state.round
    assert round is not None
    assert (round.number, round.members, round.protocol) == (7, (), OTHER)
    assert f"but this process uses version {PROTOCOL_VERSION}; install the same release on all nodes" in round.cause


def test_a_size_of_another_version_or_beyond_the_bounds_is_malformed() -> None:
    assert decode_same_version(encode(SIZE), SizeRecord) == SIZE
    with pytest.raises(MalformedRecord, match=r"another process uses version .* of torchelastic's protocol"):
        decode_same_version(encode(msgspec.structs.replace(SIZE, protocol=OTHER)), SizeRecord)
    with pytest.raises(MalformedRecord, match="not a SizeRecord"):
        decode(b"[]", SizeRecord)
    with pytest.raises(MalformedRecord):
        decode(encode(NodeRecord("a", "b", 1, SIZE, round=2**53)), NodeRecord)


def test_unreadable_records_are_logged_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    limit = LogLimit()
    assert sum(limit.allows() for _ in range(1000)) == 10
    now += 60
    assert sum(limit.allows() for _ in range(1000)) == 10


def test_the_lease_id_is_derived_from_the_run_id() -> None:
    leases = {run_lease(run) for run in ("a", "b", "a/b", "a%2Fb", "", "ключ", "\udcff")}
    assert len(leases) == 7
    assert all(0 < lease < 2**63 for lease in leases)
    assert run_lease("0b0c7a52-8f0e-4c61-9a4e-6f0d5b0a9a11") == 383779628911130922


def test_invalid_unicode_is_encoded_without_growing() -> None:
    record = RoundRecord(number=7, members=(Member("a.1", "\udcff", 2),), cause="\udcff" * 16384)
    read = decode_state(encode(StateRecord(record))).round
    assert read is not None
    assert (read.number, read.members, read.cause) == (7, (Member("a.1", "?", 2),), "?" * 16384)


@pytest.mark.parametrize("text", ["a", "ß", "🧯", "\n", "\x00", "\udcff", "\U0001f9ef\u200d"])
def test_a_termination_message_fits_the_kubelets_limit(text: str) -> None:
    failure = FailureRecord(round=1, rank=2, local_rank=0, node="a.1", exit_code=-9, message=text * 4096)
    message = TerminationMessage(reason="WorkerFailed", message=text * 16000, round=3, failure=failure)
    data = encode_termination_message(message)
    assert len(data) <= 4096
    read = decode(data, TerminationMessage)
    assert read.failure is not None
    assert (read.reason, read.round, read.failure.exit_code) == ("WorkerFailed", 3, -9)
    assert "\ufffd" not in data.decode()
    whole = text.encode(errors="replace").decode()
    for shortened in (read.message, read.failure.message):
        assert shortened.startswith(whole)
        assert shortened.endswith(whole)
        assert " … " in shortened
