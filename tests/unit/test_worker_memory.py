"""The memory between a worker and its agent: what the one leaves the other finds, and nothing else."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.spoiling import BESIDE, LENGTH_OF_NAMES, NAMES, SIZE, SPOILING, write_names
from torchelastic.metrics import memory
from torchelastic.metrics.memory import MemoryReader, MemoryWriter
from torchelastic.metrics.names import Form, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

GAUGE = Form()
COUNTER = Form(Kind.COUNTER)
HISTOGRAM = Form(Kind.HISTOGRAM, (0.1, 1.0, 10.0))
BELOW_0 = Form(Kind.HISTOGRAM, (-1.0, 1.0))


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, MemoryReader]:
    path = tmp_path / "memory" / "1.0"
    path.parent.mkdir()
    return path, memory.make(path)


@pytest.fixture
def path(made: tuple[Path, MemoryReader]) -> Path:
    return made[0]


@pytest.fixture
def reader(made: tuple[Path, MemoryReader]) -> MemoryReader:
    return made[1]


def texts(reader: MemoryReader) -> dict[tuple[str, ...], tuple[float, ...]]:
    return {source.names: words for source, words in reader.values().items()}


def test_what_is_written_is_read_once_its_first_value_is_there(path: Path, reader: MemoryReader) -> None:
    writer = MemoryWriter(str(path))
    assert reader.values() == {}
    loss, steps = writer.place(("my_app", "loss"), GAUGE), writer.place(("my_app", "step"), HISTOGRAM)
    assert loss is not None
    assert steps is not None
    writer.values[loss] = 0.5
    writer.values[steps + 1] += 1
    assert reader.values() == {}
    writer.publish()
    assert texts(reader) == {("my_app", "loss"): (0.5,), ("my_app", "step"): (0, 1, 0, 0, 0)}
    writer.values[loss] = 0.25
    assert texts(reader)["my_app", "loss"] == (0.25,)


def test_a_name_has_one_place_for_each_form(path: Path) -> None:
    writer = MemoryWriter(str(path))
    places = [writer.place(("my_app", "x"), form) for form in (GAUGE, COUNTER, HISTOGRAM, GAUGE)]
    assert places[0] == places[3]
    assert len(set(places)) == 3


@pytest.mark.parametrize("name", ["損失", "", "\udc80", "\0", 'quote " and \\ and \n', "a" * 100_000])
def test_any_text_is_a_name(path: Path, reader: MemoryReader, name: str) -> None:
    writer = MemoryWriter(str(path))
    assert writer.place(("my_app", name), GAUGE) != writer.place(("my_app", f"{name}b"), GAUGE)
    writer.publish()
    ((_, read), (_, other)) = texts(reader)
    assert read != other
    assert read == name or (name.startswith(read[:300]) and len(read) < 400)


def test_whoever_writes_there_next_goes_on_where_the_one_before_ended(path: Path, reader: MemoryReader) -> None:
    program = (
        "import sys; from torchelastic.metrics.memory import *; from torchelastic.metrics.names import Form, Kind; "
        "writer = MemoryWriter(sys.argv[1]); writer.values[writer.place(('my_app', 'n'), Form(Kind.COUNTER))] += 2; "
        "writer.publish()"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program, path], check=True)
    writer = MemoryWriter(str(path))
    assert writer.place(("my_app", "other"), GAUGE) != writer.place(("my_app", "n"), COUNTER)
    writer.publish()
    assert texts(reader) == {("my_app", "n"): (4,), ("my_app", "other"): (0,)}


def test_one_process_at_a_time_writes(path: Path) -> None:
    program = "import sys; from torchelastic.metrics.memory import *; MemoryWriter(sys.argv[1])"
    writer = MemoryWriter(str(path))
    ended = subprocess.run([sys.executable, "-c", program, path], check=False, capture_output=True, text=True)
    assert "BlockingIOError" in ended.stderr
    assert writer.place(("my_app", "n"), GAUGE) is not None


def test_there_is_an_end_to_the_room(path: Path, reader: MemoryReader) -> None:
    writer = MemoryWriter(str(path))
    many = Form(Kind.HISTOGRAM, tuple(map(float, range(2000))))
    places = [writer.place(("my_app", f"size {number}"), many) for number in range(20)]
    assert places[0] is not None
    assert places[-1] is None
    assert writer.place(("my_app", "loss"), GAUGE) is not None
    writer.publish()
    assert len(texts(reader)) == sum(place is not None for place in places) + 1


@pytest.mark.parametrize("there", [20, 8, 0])
def test_a_name_that_is_only_partly_there_is_none_until_it_is(path: Path, reader: MemoryReader, there: int) -> None:
    writer = MemoryWriter(str(path))
    writer.place(("my_app", "first"), GAUGE)
    writer.place(("my_app", "second"), GAUGE)
    writer.publish()
    whole = path.read_bytes()
    length = 8 + -(-struct.unpack_from("=I", whole, NAMES)[0] // 8) * 8
    with path.open("r+b") as file:
        file.seek(NAMES + length + there)
        file.write(bytes(40 - there))
    assert list(texts(reader)) == [("my_app", "first")]
    with path.open("r+b") as file:
        file.write(whole)
    assert list(texts(reader)) == [("my_app", "first"), ("my_app", "second")]


@pytest.mark.parametrize(
    "body",
    [
        b"null",
        b"[" * 100_000,
        b'[["a", "b"], "gauge", [], 20000000000000]',
        b'[["a", "b"], "gauge", [], 3]',
        b'[["a", "b"], "gauge", [], true]',
        b'[["a", "b"], "gauge", [1], 16]',
        b'[["a", "b"], "histogram", [], 16]',
        b'[["a", "b"], "histogram", [2, 1], 16]',
        b'[["a", "b"], "histogram", [NaN], 16]',
        b'[["a", "b"], "histogram", ["x"], 16]',
        b'[["a", "b"], "histogram", [[1]], 16]',
        b'[["a", "b"], "histogram", 1, 16]',
        b'[["a", "b"], "histogram", [1%s], 16]' % (b"0" * 400),
        b'[["a", "b"], "histogram", [1%s], 16]' % (b"0" * 5000),
        b'[["a", "b"], "histogram", [1e999], 16]',
        b'[["a", "b"], {}, [], 16]',
        b'[3, "gauge", [], 16]',
        b'[["a", "b"], ["gauge"], [], 16]',
        b'[["a"], "gauge", [], 16]',
        b'[["a", 1], "gauge", [], 16]',
        b'\xff[["a", "b"], "gauge", [], 16]',
    ],
)
def test_what_is_no_name_is_passed_over_by_the_agent_and_the_next_program(
    path: Path, reader: MemoryReader, body: bytes
) -> None:
    write_names(path, body, b'[["a", "b"], "gauge", [], 16]')
    assert texts(reader) == {("a", "b"): (0,)}
    writer = MemoryWriter(str(path))
    assert writer.place(("a", "b"), GAUGE) == 16
    assert writer.place(("a", "c"), GAUGE) == 17


@pytest.fixture
def counter(path: Path) -> Callable[[], None]:
    """Counts one more of ``n``, as the worker does; it has counted 4, and not taken one."""
    writer = MemoryWriter(str(path))
    place = writer.place(("my_app", "n"), COUNTER)
    assert place is not None
    writer.values[place] = 4
    writer.publish()
    writer.count_dropped("negative")

    def count() -> None:
        writer.values[place] += 1

    return count


@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize("spoil", SPOILING.values(), ids=SPOILING)
def test_a_file_that_was_spoiled_is_an_empty_one(
    path: Path, reader: MemoryReader, spoil: Callable[[Path], None]
) -> None:
    spoil(path)
    for _ in range(2):
        assert reader.values() == {}
    assert sum(reader.dropped()) in (0, 1)


@pytest.mark.parametrize("change", BESIDE.values(), ids=BESIDE)
def test_what_has_the_files_path_later_is_not_read(
    path: Path, reader: MemoryReader, counter: Callable[[], None], change: Callable[[Path], None]
) -> None:
    change(path)
    assert texts(reader) == {("my_app", "n"): (4,)}
    counter()
    assert texts(reader) == {("my_app", "n"): (5,)}
    assert sum(reader.dropped()) == 1


def test_what_has_the_path_already_is_not_taken_for_a_new_file(path: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(path)
    for taken in (path, link):
        with pytest.raises(FileExistsError):
            memory.make(taken)
    assert len(path.read_bytes()) == SIZE


@pytest.mark.parametrize("word", [math.nan, -1.0, -math.inf])
def test_what_is_no_count_is_none(path: Path, reader: MemoryReader, word: float) -> None:
    writer = MemoryWriter(str(path))
    forms = {"gauge": GAUGE, "counter": COUNTER, "buckets": HISTOGRAM, "sum": HISTOGRAM, "sum below 0": BELOW_0}
    for name, form in forms.items():
        place = writer.place(("my_app", name), form)
        assert place is not None
        writer.values[place + (len(form.buckets) + 1 if name.startswith("sum") else 0)] = word
    writer.publish()
    for place in range(2, 6):
        writer.values[place] = word
    assert [names[1] for names in texts(reader)] == ["gauge", "sum below 0"]
    assert reader.dropped() == (0, 0, 0, 0)


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_no_bytes_whatever_confuse_the_reader(
    tmp_path_factory: pytest.TempPathFactory, names: bytes, length: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "memory"
    reader = memory.make(path)
    with path.open("r+b") as file:
        file.seek(LENGTH_OF_NAMES)
        file.write(length.to_bytes(8, sys.byteorder))
        file.seek(NAMES)
        file.write(names)
    assert reader.values() == {}
    path.unlink()


def test_a_file_of_another_version_is_none(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"TEmetr\0\2")
    with pytest.raises(ValueError, match="another version"):
        MemoryWriter(str(path))


def test_no_file_is_left_where_there_is_no_room() -> None:
    with pytest.raises(OSError, match=r".") as error:
        memory.make(Path("/proc/self/memory"))
    assert error.value.errno
