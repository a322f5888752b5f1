"""The environment of a launched function for PyTorch Lightning."""

from __future__ import annotations

import os


class _Ranks:
    """Tells a Trainer in a launched function the ranks of its worker, as a plugin."""

    creates_processes_externally = True

    @staticmethod
    def detect() -> bool:
        """Return whether this is a worker."""
        return "TORCHELASTIC_RUN_ID" in os.environ

    @property
    def main_address(self) -> str:
        """The host of the first worker."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """The port of the first worker's store."""
        return int(os.environ["MASTER_PORT"])

    def world_size(self) -> int:
        """Return the number of workers."""
        return int(os.environ["WORLD_SIZE"])

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launch has set it."""

    def global_rank(self) -> int:
        """Return the rank of this worker."""
        return int(os.environ["RANK"])

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launch has set it."""

    def local_rank(self) -> int:
        """Return the rank of this worker on its host."""
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self) -> int:
        """Return the rank of this worker's host."""
        return int(os.environ["GROUP_RANK"])


def __getattr__(name: str) -> object:
    """Return ``TorchrunxClusterEnvironment``, whose base class is Lightning's."""
    if name != "TorchrunxClusterEnvironment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from lightning.fabric.plugins.environments import ClusterEnvironment
    except ImportError:
        try:
            from lightning_fabric.plugins.environments import ClusterEnvironment
        except ImportError:
            raise ImportError(f"{name} needs PyTorch Lightning: pip install lightning.") from None
    made = globals()[name] = type(
        name, (_Ranks, ClusterEnvironment), {"__module__": __name__, "__doc__": _Ranks.__doc__}
    )
    return made
