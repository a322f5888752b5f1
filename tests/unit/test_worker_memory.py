"""The metric memory that a worker writes and its agent reads."""

from __future__ import annotations

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
    assert [source for source, _ in reader.values()] == [LOSS]
    path.write_bytes(whole)
    assert [source for source, _ in reader.values()] == [LOSS, STEP]
