"""The metric memory that a worker writes and its agent reads."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from torchelastic.metrics.series import Form, Kind
from torchelastic.metrics.shared_memory import MemoryReader, MemoryWriter, Source

if TYPE_CHECKING:
    from pathlib import Path

LOSS = Source("my_app", "loss", Form())
STEP = Source("my_app", "step", Form(Kind.HISTOGRAM, (0.1, 1.0, 10.0)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1.0"


@pytest.fixture
def reader(path: Path) -> MemoryReader:
    return MemoryReader(path)


def test_written_values_are_read(path: Path, reader: MemoryReader) -> None:
    writer = MemoryWriter(str(path))
    assert reader.values() == {}
    loss, steps = writer.place(LOSS), writer.place(STEP)
    assert loss is not None
    assert steps is not None
    writer.values[loss] = 0.5
    writer.values[steps + 1] += 1
    assert reader.values() == {LOSS: (0.5,), STEP: (0, 1, 0, 0, 0)}
    writer.values[loss] = 0.25
    assert reader.values()[LOSS] == (0.25,)


def test_a_name_has_one_place_per_form(path: Path, reader: MemoryReader) -> None:
    writer = MemoryWriter(str(path))
    forms = (Form(), Form(Kind.COUNTER), Form(Kind.HISTOGRAM, (1.0,)), Form())
    places = [writer.place(Source("my_app", "x", form)) for form in forms]
    assert places[0] == places[3]
    assert len(set(places)) == 3


@pytest.mark.parametrize("name", ["損失", "", "\udc80", "\0", 'quote " and \\ and \n', "a" * 100_000])
def test_any_text_is_a_valid_name(path: Path, reader: MemoryReader, name: str) -> None:
    writer = MemoryWriter(str(path))
    source = Source("my_app", name, Form())
    assert writer.place(source) is not None
    assert reader.values() == {source: (0,)}


PROGRAM = """
import sys
from torchelastic.metrics.shared_memory import *
writer = MemoryWriter(sys.argv[1])
writer.values[writer.place(Source('my_app', 'n', Form(Kind.COUNTER)))] += 2
"""


def test_one_process_at_a_time_writes_and_continues_its_predecessors_values(path: Path, reader: MemoryReader) -> None:
    for _ in range(2):
        subprocess.run([sys.executable, "-c", PROGRAM, path], check=True)
    writer = MemoryWriter(str(path))
    assert writer.place(LOSS) is not None
    expected = {Source("my_app", "n", Form(Kind.COUNTER)): (4,), LOSS: (0,)}
    assert reader.values() == expected
    ended = subprocess.run([sys.executable, "-c", PROGRAM, path], check=False, capture_output=True, text=True)
    assert "BlockingIOError" in ended.stderr
    assert reader.values() == expected


def test_a_full_memory_refuses_large_metrics_only(path: Path, reader: MemoryReader) -> None:
    writer = MemoryWriter(str(path))
    many = Form(Kind.HISTOGRAM, tuple(map(float, range(2000))))
    places = [writer.place(Source("my_app", f"size {number}", many)) for number in range(20)]
    assert places[0] is not None
    assert places[-1] is None
    assert writer.place(LOSS) is not None
    assert len(reader.values()) == sum(place is not None for place in places) + 1


def test_a_partly_written_name_is_read_when_it_is_complete(path: Path, reader: MemoryReader) -> None:
    writer = MemoryWriter(str(path))
    writer.place(LOSS)
    writer.place(STEP)
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(whole.index(b"step"))
        file.write(bytes(40))
    assert list(reader.values()) == [LOSS]
    path.write_bytes(whole)
    assert list(reader.values()) == [LOSS, STEP]


@pytest.mark.parametrize("taken", ["1.0", "link", "missing/1.0"])
def test_an_unusable_path_is_an_error(path: Path, reader: MemoryReader, tmp_path: Path, taken: str) -> None:
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match=r"exists|No such file"):
        MemoryReader(tmp_path / taken)
    assert len(path.read_bytes()) > 0
