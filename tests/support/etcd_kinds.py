"""The versions of etcd for tests of the store and the rendezvous, as pytest parameters.

Etcd 3.7 and 3.4 are built once; etcd 3.5 is a Python package. Etcd 3.4 is used only with TORCHELASTIC_EXHAUSTIVE=1 in
the environment. Without this variable, slow tests use only the newest etcd and the API v2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from elastic_operator.local.processes import find_etcd
from testbed import binaries
from testbed.availability import EXHAUSTIVE
from tests.support.etcd import EtcdServer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class EtcdKind:
    """A version of etcd, and the version of its API that is used.

    Attributes:
        version: the version, such as 3.7.
        api: the version of the API: 3 or 2.
    """

    version: str
    api: int = 3

    @property
    def name(self) -> str:
        """The id in test names."""
        return self.version if self.api == 3 else f"{self.version}-v{self.api}"

    @property
    def binary(self) -> Path:
        """The path of the program."""
        if self.version == "3.5":
            return find_etcd("")  # the package
        return binaries.binary("etcd" if self.version == "3.7" else f"etcd-{self.version}")

    def server(self, folder: Path, *, args: Sequence[str] = (), protocol: str = "http") -> EtcdServer:
        """Return a server that can be started; see :class:`~tests.support.etcd.EtcdServer`."""
        sync = self.version == "3.4"
        return EtcdServer(folder, binary=self.binary, args=args, protocol=protocol, api=self.api, sync=sync)


V3: Final = tuple(EtcdKind(version) for version in ("3.7", "3.5", "3.4"))
V2: Final = tuple(EtcdKind(version, api=2) for version in ("3.5", "3.4"))


def parameters(*kinds: EtcdKind) -> list[Any]:
    """Return the pytest parameters: one for each kind, with the mark that it needs."""
    marks = {"3.7": pytest.mark.etcds, "3.4": pytest.mark.oldest_etcd, "3.5": ()}
    return [pytest.param(kind, id=kind.name, marks=marks[kind.version]) for kind in kinds]


def chosen() -> list[Any]:
    """Return the parameters for slow tests: the newest etcd and the API v2; in exhaustive runs, all kinds."""
    return parameters(*V3, *V2) if EXHAUSTIVE else parameters(V3[0], V2[0])
