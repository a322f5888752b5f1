"""``python -m torchelastic.distributed.launch``, the older name of ``torchelastic-run``."""

import sys

from torchelastic.run import (
    command,
    determine_local_world_size,
    get_args_parser,
    main,
    parse_args,
    parse_min_max_nnodes,
    run,
)

__all__ = ["determine_local_world_size", "get_args_parser", "main", "parse_args", "parse_min_max_nnodes", "run"]

if __name__ == "__main__":
    sys.exit(command())
