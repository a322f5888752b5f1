"""How keys and values stand in an etcd v2, whatever is in them."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchelastic.contract import RunKeys
from torchelastic.store.etcd_v2_names import Stored, folder_of, folders_above, key_of, path_of

PARTS = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=8)
KEYS = st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: "".join(f"/{part}" for part in parts))


@given(KEYS)
@example("/torchelastic/../c/epoch")
@example("/_hidden/.")
@example("/a//b/")
@example("/~2f~-~")
@example("/\udcff")
def test_a_key_is_read_back_from_its_path(key: str) -> None:
    path = path_of(key)
    assert key_of(path) == key
    # Nothing that a server, a client or a proxy would take for anything but a name.
    assert re.fullmatch(r"(/[A-Za-z0-9~-][A-Za-z0-9._~-]*)+", path)


@given(KEYS, KEYS)
@example("/n", "/n/1")
def test_no_two_keys_share_a_path_and_none_is_in_the_way_of_another(one: str, other: str) -> None:
    assert (path_of(one) == path_of(other)) == (one == other)
    assert path_of(one) not in folders_above(path_of(other))


@given(KEYS, st.data())
def test_the_folder_of_a_prefix_is_above_all_keys_that_have_it(key: str, data: st.DataObject) -> None:
    prefix = key[: data.draw(st.integers(0, len(key)))]
    assert folder_of(prefix) in {"/", *folders_above(path_of(key))}


def test_the_keys_of_a_run_can_be_read_by_a_person() -> None:
    keys = RunKeys.of("digits-7")
    assert path_of(keys.epoch) == "/torchelastic/digits-7/c/epoch~"
    assert folder_of(keys.nodes) == "/torchelastic/digits-7/n"
    assert folders_above(path_of(keys.epoch)) == [
        "/torchelastic/digits-7/c",
        "/torchelastic/digits-7",
        "/torchelastic",
    ]


def test_what_others_have_put_there_is_nobodys_key() -> None:
    for path in ("/torchelastic/run/c/epoch", "/a~g/b~", "/ä~", "/a b~", "//a~"):
        assert key_of(path) is None


def test_a_key_without_its_slash_is_refused() -> None:
    with pytest.raises(ValueError, match="begin with a slash"):
        path_of("torchelastic/run")


@given(st.binary(max_size=64), st.integers(0, 2**63 - 1))
@example(b"\xed\xa0\x80", 1)
def test_a_value_is_read_back_with_its_lease_and_its_stamp(value: bytes, lease: int) -> None:
    stored = Stored.new(value, lease)
    assert Stored.read(stored.text) == stored
    assert stored.stamp


def test_each_write_has_a_stamp_of_its_own() -> None:
    assert Stored.new(b"same", 0).text != Stored.new(b"same", 0).text


@given(st.text())
@example("5f2a9c01d3e4 1f b no base64")
def test_what_others_have_written_is_a_value_as_it_is(text: str) -> None:
    stored = Stored.read(text)
    assert stored == Stored(text.encode("utf-8", "surrogatepass"))


def test_a_value_that_is_text_stays_readable() -> None:
    assert Stored(b'{"e":7}', 31, "5f2a9c01d3e4").text == '5f2a9c01d3e4 1f t {"e":7}'
