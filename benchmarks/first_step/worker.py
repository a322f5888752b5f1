"""A worker that prints the world size after its first all-reduce."""

from __future__ import annotations

import torch
from torch import distributed

distributed.init_process_group("gloo")
ones = torch.ones(1)
distributed.all_reduce(ones)
print(f"a world of {int(ones)}", flush=True)
distributed.destroy_process_group()
