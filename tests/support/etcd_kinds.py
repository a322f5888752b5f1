"""The etcds that the store and the rendezvous are tried on, each as a parameter for tests.

Etcd 3.7 and 3.4 are built once (the mark ``etcds`` sees to it), 3.5 comes as a package. What takes long is tried on the
newest one and on the old API by default, and on all of them with TORCHELASTIC_EXHAUSTIVE=1 in the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.etcd import EtcdServer, packaged_etcd
from tests.support.testbed import binaries

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EXHAUSTIVE: Final = os.environ.get("TORCHELASTIC_EXHAUSTIVE", "") not in {"", "0"}
"""Whether all is to be tried that can be, however long it takes."""


@dataclass(frozen=True, slots=True)
class EtcdKind:
    """A version of etcd, and the version of its API that is spoken.

    Attributes:
        version: such as 3.7.
        api: 3 or 2.
    """

    version: str
    api: int = 3

    @property
    def name(self) -> str:
        """For the ids of tests."""
        return self.version if self.api == 3 else f"{self.version}-v{self.api}"

    @property
    def binary(self) -> Path:
        """The program."""
        if self.version == "3.5":
            return packaged_etcd()
        return binaries.binary("etcd" if self.version == "3.7" else f"etcd-{self.version}", the_users=False)

    def server(self, folder: Path, *, args: Sequence[str] = (), protocol: str = "http") -> EtcdServer:
        """One that can be started; see :class:`~tests.support.etcd.EtcdServer`."""
        return EtcdServer(folder, binary=self.binary, args=args, protocol=protocol, api=self.api)


V3: Final = tuple(EtcdKind(version) for version in ("3.7", "3.5", "3.4"))
V2: Final = tuple(EtcdKind(version, api=2) for version in ("3.5", "3.4"))


def parameters(*kinds: EtcdKind) -> list[Any]:
    """For pytest: one for each kind, with the mark that it needs."""
    return [
        pytest.param(kind, id=kind.name, marks=() if kind.version == "3.5" else pytest.mark.etcds) for kind in kinds
    ]


def chosen() -> list[Any]:
    """For tests that take long: the newest etcd, and the old API; or all of them."""
    return parameters(*V3, *V2) if EXHAUSTIVE else parameters(V3[0], V2[0])
