"""What stands in the store and in last words can be told apart by version, and a run's lease is found by its id."""

from __future__ import annotations

import msgspec
import pytest

from torchelastic.errors import MalformedRecord
from torchelastic.protocol import (
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
    TerminationMessage,
    decode,
    decode_size,
    decode_state,
    encode,
    encode_termination_message,
    run_lease,
)

OTHER = PROTOCOL_VERSION + 1
SIZE = SizeRecord(min=1, max=2)


@pytest.mark.parametrize(
    "record",
    [
        SIZE,
        RoundRecord(number=1),
        LeaderRecord(node="a", address="b:1"),
        NodeRecord(name="a", address="b", workers=1, size=SIZE),
    ],
    ids=lambda record: type(record).__name__,
)
def test_every_record_says_its_version_so_that_a_reader_of_another_one_can_tell(record: msgspec.Struct) -> None:
    assert msgspec.json.decode(encode(record))["protocol"] == PROTOCOL_VERSION


def test_last_words_say_their_version_too() -> None:
    words = encode_termination_message(TerminationMessage(reason="BadInput", message="x" * 10_000))
    assert msgspec.json.decode(words)["protocol"] == PROTOCOL_VERSION


def test_an_round_of_our_own_version_is_read_in_full() -> None:
    round = RoundRecord(number=7, members=(Member("a.1", "10.0.0.1", 2),), store="10.0.0.1:4000", restarts=3)
    assert decode_state(encode(StateRecord(round))) == StateRecord(round)


def test_an_round_that_says_nothing_of_a_failure_is_read_as_well_as_one_that_does() -> None:
    bare = decode_state(b'{"round":{"number":7,"members":[],"restarts":1}}').round
    assert bare is not None
    assert bare.failure is None
    failure = FailureRecord(round=6, rank=2, local_rank=0, node="a.1", exit_code=-9)
    round = RoundRecord(number=7, restarts=1, failure=failure)
    assert decode_state(encode(StateRecord(round))).round == round


def test_of_an_round_of_another_version_the_number_is_believed_and_nothing_else() -> None:
    record = b'{"round":{"number":7,"protocol":%d,"members":"in a form that nobody here knows","store":4},"outcome":%s}'
    outcome = OutcomeRecord(OutcomeState.FAILED, round=7, message="it broke")
    state = decode_state(record % (OTHER, encode(outcome)))
    assert state.outcome == outcome
    round = state.round
    assert round is not None
    assert (round.number, round.members, round.protocol) == (7, (), OTHER)
    assert f"({OTHER}, and {PROTOCOL_VERSION} here); use the same release everywhere" in round.cause


def test_a_size_of_another_version_is_left_alone() -> None:
    assert decode_size(encode(SIZE)) == SIZE
    with pytest.raises(MalformedRecord, match="another version of torchelastic's protocol"):
        decode_size(encode(msgspec.structs.replace(SIZE, protocol=OTHER)))
    with pytest.raises(MalformedRecord, match="not a SizeRecord"):
        decode(b"[]", SizeRecord)


def test_an_implausibly_large_round_number_makes_a_record_malformed() -> None:
    with pytest.raises(MalformedRecord):
        decode(encode(NodeRecord("a", "b", 1, SIZE, round=2**53)), NodeRecord)


def test_the_lease_of_a_run_has_an_id_that_all_can_work_out_and_etcd_takes() -> None:
    leases = {run_lease(run) for run in ("a", "b", "a/b", "a%2Fb", "", "ключ", "\udcff")}
    assert len(leases) == 7
    assert all(0 < lease < 2**63 for lease in leases)
    assert run_lease("0b0c7a52-8f0e-4c61-9a4e-6f0d5b0a9a11") == 383779628911130922


def test_texts_that_are_no_unicode_can_be_written_and_are_not_longer_than_before() -> None:
    record = RoundRecord(number=7, members=(Member("a.1", "\udcff", 2),), cause="\udcff" * 16384)
    read = decode_state(encode(StateRecord(record))).round
    assert read is not None
    assert (read.number, read.members, read.cause) == (7, (Member("a.1", "?", 2),), "?" * 16384)


@pytest.mark.parametrize("text", ["a", "ß", "訓", "🧯", "\n", "\x00", "\udcff", "\U0001f9ef\u200d"])
def test_last_words_are_whole_and_fit_whatever_the_texts_are_made_of(text: str) -> None:
    failure = FailureRecord(round=1, rank=2, local_rank=0, node="a.1", exit_code=-9, message=text * 4096)
    message = TerminationMessage(reason="WorkerFailed", message=text * 16000, round=3, failure=failure)
    words = encode_termination_message(message)
    assert len(words) <= 4096
    read = decode(words, TerminationMessage)
    assert read.failure is not None
    assert (read.reason, read.round, read.failure.exit_code) == ("WorkerFailed", 3, -9)
    assert "\ufffd" not in words.decode()
    whole = text.encode(errors="replace").decode()
    for shortened in (read.message, read.failure.message):
        assert shortened.startswith(whole)
        assert shortened.endswith(whole)
        assert " … " in shortened
