"""Saving a changed file does what `kubectl apply` would do."""

import copy
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.merge import three_way_merge

KEYS = st.sampled_from("abcd")
SCALARS = st.integers(0, 3) | st.booleans() | st.sampled_from(["", "x"]) | st.lists(st.integers(0, 2), max_size=2)


def objects(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings of mappings, with these at the ends."""
    values = st.recursive(leaves, lambda below: st.dictionaries(KEYS, below, max_size=3), max_leaves=8)
    return st.dictionaries(KEYS, values, max_size=4)


OBJECTS = objects(SCALARS)
FILES = objects(SCALARS | st.none())


def named_in(file: Mapping[str, Any], merged: Mapping[str, Any]) -> bool:
    """Whether all that the file names stands in the merged object as the file has it."""
    return all(
        named_in(value, merged[key]) if isinstance(value, Mapping) and key in merged else merged.get(key, ...) == value
        for key, value in file.items()
    )


def ends(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """What is no mapping, or an empty one, with the way to it."""
    found: dict[tuple[str, ...], Any] = {}
    for key, below in value.items():
        found |= ends(below, (*path, key)) if isinstance(below, Mapping) and below else {(*path, key): below}
    return found


@given(last=FILES, live=OBJECTS, new=OBJECTS)
def test_what_the_file_names_is_set(last: dict[str, Any], live: dict[str, Any], new: dict[str, Any]) -> None:
    assert named_in(new, three_way_merge(last, live, new))


@given(last=OBJECTS, live=OBJECTS, new=OBJECTS)
def test_what_the_file_named_and_no_longer_names_is_removed(
    last: dict[str, Any], live: dict[str, Any], new: dict[str, Any]
) -> None:
    merged = three_way_merge(last, live, new)
    for key in last.keys() - new.keys():
        assert key not in merged


@given(last=OBJECTS, live=OBJECTS, new=OBJECTS)
def test_what_the_file_never_named_stays(last: dict[str, Any], live: dict[str, Any], new: dict[str, Any]) -> None:
    merged = three_way_merge({"in": last}, {"in": live}, {"in": new})["in"]
    for key in live.keys() - last.keys() - new.keys():
        assert merged[key] == live[key]


@given(last=OBJECTS, live=OBJECTS, new=OBJECTS)
def test_nothing_comes_from_nowhere(last: dict[str, Any], live: dict[str, Any], new: dict[str, Any]) -> None:
    sources = [*ends(live).items(), *ends(new).items()]
    for path, value in ends(three_way_merge(last, live, new)).items():
        assert (path, value) in sources or value == {}


@given(last=FILES, live=OBJECTS, new=FILES)
def test_the_same_file_applied_again_changes_nothing(
    last: dict[str, Any], live: dict[str, Any], new: dict[str, Any]
) -> None:
    once = three_way_merge(last, live, new)
    assert three_way_merge(new, once, new) == once


@given(file=FILES, live=OBJECTS)
def test_an_unchanged_file_undoes_only_what_it_names(file: dict[str, Any], live: dict[str, Any]) -> None:
    merged = three_way_merge(file, live, file)
    assert merged.keys() >= live.keys()
    for key in live.keys() - file.keys():
        assert merged[key] == live[key]


@given(last=FILES, live=OBJECTS, new=FILES)
def test_the_arguments_are_left_alone_and_shared_with_nobody(
    last: dict[str, Any], live: dict[str, Any], new: dict[str, Any]
) -> None:
    before = copy.deepcopy((last, live, new))
    merged = three_way_merge(last, live, new)
    spoil(merged)
    assert (last, live, new) == before


def spoil(value: object) -> None:
    """Write into every mapping and list."""
    if isinstance(value, dict):
        for below in value.values():
            spoil(below)
        value["spoiled"] = True
    elif isinstance(value, list):
        value.append("spoiled")


@given(new=OBJECTS)
def test_a_new_object_is_what_the_file_says(new: dict[str, Any]) -> None:
    assert three_way_merge({}, {}, new) == new


def test_a_number_that_was_scaled_stays_when_the_file_never_named_it() -> None:
    file = {"spec": {"maxReplicas": 3}}
    live = {"spec": {"maxReplicas": 3, "maxRestarts": 100, "replicas": 2}}
    changed = {"spec": {"maxReplicas": 5}}
    assert three_way_merge(file, live, changed) == {"spec": {"maxReplicas": 5, "maxRestarts": 100, "replicas": 2}}


def test_a_number_that_was_scaled_is_set_back_when_the_file_names_it() -> None:
    file = {"spec": {"replicas": 2}}
    assert three_way_merge(file, {"spec": {"replicas": 3}}, file) == file


def test_a_number_that_the_file_no_longer_names_is_removed() -> None:
    assert three_way_merge({"spec": {"replicas": 2}}, {"spec": {"replicas": 3}}, {"spec": {}}) == {"spec": {}}


def test_with_a_mapping_all_that_stands_in_it_is_removed() -> None:
    assert three_way_merge({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, {}) == {}
    assert three_way_merge({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, {"a": {}}) == {"a": {"c": 2}}


def test_lists_are_replaced_as_a_whole() -> None:
    live = {"args": ["a", "b"], "env": [{"name": "A"}, {"name": "B"}]}
    assert three_way_merge({}, live, {"env": [{"name": "C"}]}) == {"args": ["a", "b"], "env": [{"name": "C"}]}


def test_a_null_removes_once() -> None:
    assert three_way_merge({}, {"a": 1}, {"a": None}) == {}
    assert three_way_merge({"a": None}, {"a": 1}, {"a": None}) == {"a": 1}


def test_a_mapping_in_another_values_place_takes_it() -> None:
    assert three_way_merge({"a": 1}, {"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}
    assert three_way_merge({"a": {"b": 2}}, {"a": {"b": 2}}, {"a": 1}) == {"a": 1}
