"""Collectives for :meth:`torchelastic.State.sync`; and, as in torch, the launcher's older name: see :mod:`.launch`."""

from torchelastic.lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "torchelastic.distributed.collectives": (
            "all_gather_return_max_long broadcast_binary broadcast_bool broadcast_float_list broadcast_long "
            "broadcast_model"
        )
    },
)
