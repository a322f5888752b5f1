"""The smallest distributed program: print the environment of each worker, and its rank in the process group."""

import os

from torch import distributed

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
)


def say(text: str) -> None:
    """Print in one write, so that the lines of several workers do not mix."""
    print(text + "\n", end="", flush=True)


def main() -> None:
    """Print the environment, join the process group and print the rank in it."""
    pid = os.getpid()
    given = [name for name in os.environ if name in NAMES or name.startswith("TORCHELASTIC_")]
    say("\n".join(f"On PID {pid}, {name}={os.environ[name]}" for name in sorted(given)))
    distributed.init_process_group(backend="gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    say(f"On PID {pid}, after init process group, rank={rank}, world_size = {world_size}")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
