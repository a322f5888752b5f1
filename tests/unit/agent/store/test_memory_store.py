"""The memory store behaves like etcd."""

from __future__ import annotations

import pytest

from tests.support.store_conformance import StoreBehavior
from torchelastic.store.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class TestMemoryStore(StoreBehavior):
    @pytest.fixture
    def other(self, store: MemoryStore) -> MemoryStore:
        return store.another()

    @pytest.fixture
    def second(self) -> float:
        return 0.15
