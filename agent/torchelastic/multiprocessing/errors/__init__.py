"""How a worker tells of its exception: ``@record``, and the errors of failed runs. Torch's, under torchelastic's name.

torch is imported when one of the names is first used, which a worker has done anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.torchs import names_of

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import (
        ChildFailedError,
        ErrorHandler,
        ProcessFailure,
        get_error_handler,
        record,
    )

__all__ = [
    "ChildFailedError",
    "ErrorHandler",
    "ProcessFailure",
    "get_error_handler",
    "record",
]

__getattr__ = names_of("torch.distributed.elastic.multiprocessing.errors", __name__, __all__)
