"""The memory between a worker and its agent: what the one leaves the other finds, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchelastic.metrics import shared_memory as memory
from torchelastic.metrics.series import Form, Kind
from torchelastic.metrics.shared_memory import MemoryReader, MemoryWriter

GAUGE = Form()
COUNTER = Form(Kind.COUNTER)
HISTOGRAM = Form(Kind.HISTOGRAM, (0.1, 1.0, 10.0))


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
        "import sys; from torchelastic.metrics.shared_memory import *; "
        "from torchelastic.metrics.series import Form, Kind; "
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
    program = "import sys; from torchelastic.metrics.shared_memory import *; MemoryWriter(sys.argv[1])"
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


def test_a_name_that_is_only_partly_there_is_read_once_it_is_complete(path: Path, reader: MemoryReader) -> None:
    writer = MemoryWriter(str(path))
    writer.place(("my_app", "first"), GAUGE)
    writer.place(("my_app", "second"), GAUGE)
    writer.publish()
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(whole.index(b"second"))
        file.write(bytes(40))
    assert list(texts(reader)) == [("my_app", "first")]
    path.write_bytes(whole)
    assert list(texts(reader)) == [("my_app", "first"), ("my_app", "second")]


def test_what_has_the_path_already_is_not_taken_for_a_new_file(path: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(path)
    for taken in (path, link):
        with pytest.raises(FileExistsError):
            memory.make(taken)
    assert len(path.read_bytes()) > 0


def test_a_file_of_another_version_is_none(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"TEmetr\0\1")
    with pytest.raises(ValueError, match="another version"):
        MemoryWriter(str(path))


def test_no_file_is_left_where_there_is_no_room() -> None:
    with pytest.raises(OSError, match=r".") as error:
        memory.make(Path("/proc/self/memory"))
    assert error.value.errno
