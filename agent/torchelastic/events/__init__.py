"""Events of a run: torch's, which is imported at the first use of a name. Our agent records none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.torch_reexports import reexport

if TYPE_CHECKING:
    from torch.distributed.elastic.events import *  # noqa: F403
    from torch.distributed.elastic.events.api import *  # noqa: F403
    from torch.distributed.elastic.events.handlers import *  # noqa: F403

__getattr__ = reexport("torch.distributed.elastic.events")
