"""Random faults of nodes, network and etcd: one round per number, the right size, and progress after the fault."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from testbed.availability import EXHAUSTIVE
from tests.support import etcd_kinds
from tests.support.faults import LEASE, FaultRun, GuaranteeViolatedError, script
from tests.support.seeds import SEED_VARIABLE, seeds
from torchelastic.config.settings import RendezvousSettings
from torchelastic.store import client

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd_kinds import EtcdKind

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROUNDS = 8 if EXHAUSTIVE else 2


@pytest.fixture(autouse=True)
def _scale_retries_to_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale the maximum retry delay with the lease, which is shorter than the default."""
    scale = LEASE / RendezvousSettings.__dataclass_fields__["lease"].default
    monkeypatch.setattr(client, "RETRY_MAX", client.RETRY_MAX * scale)


@pytest.mark.parametrize("etcd_kind", etcd_kinds.chosen())
@pytest.mark.parametrize("seed", seeds(usual=2, exhaustive=12))
async def test_random_fault_scripts_keep_the_rendezvous_guarantees(
    etcd_kind: EtcdKind, seed: int, tmp_path: Path
) -> None:
    parts: list[str] = []
    async with etcd_kind.server(tmp_path) as etcd, FaultRun(etcd, f"faults-{uuid.uuid4()}") as play:
        for part in script(seed, ROUNDS):
            parts += ["and then", *map(str, part.steps)]
            try:
                await play.play(part)
            except GuaranteeViolatedError as broken:
                again = f"{SEED_VARIABLE}={seed} repeats this script"
                pytest.fail("\n".join([f"{broken}", again, *parts]), pytrace=False)
    assert play.rounds
