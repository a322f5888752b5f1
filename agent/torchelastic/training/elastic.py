"""The entry of a training program into its worlds: see :func:`elastic`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from torchelastic.training.agent_worlds import WORLDS
from torchelastic.training.state import TorchState
from torchelastic.training.worlds import call_in_worlds

if TYPE_CHECKING:
    from collections.abc import Callable

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_State = TypeVar("_State", bound=TorchState)


def elastic(
    train: Callable[Concatenate[_State, _Parameters], _Result],
) -> Callable[Concatenate[_State, _Parameters], _Result]:
    """Decorate the function that trains: it is called again, with the state intact, when the world of ranks changes.

    ::

        @torchelastic.elastic
        def train(state):
            model = DistributedDataParallel(state.model)
            for epoch in range(state.data.batch_sampler.epoch, 10):
                for batch in state.data:
                    ...
                    state.commit()

    For each call, there is a process group of the current ranks, and the state is the same on all of them: that of a
    rank that has trained on; or else the newest checkpoint; or else that of rank 0 at the first start. When a rank is
    lost, or joins or leaves, the other processes continue: the function is called again in the next world. At most the
    step that was under way is repeated.

    Processes continue under an agent (``torchelastic-run``, a pod of an ElasticJob) if no GPU is available. In any
    other case, and if the program itself has called ``init_process_group()``, the function is called once, and workers
    that start again continue from the last checkpoint. With ``TORCHELASTIC_NCCL_IN_PLACE=1``, processes with GPUs
    continue, too, and go back to the newest checkpoint after a rank was lost; this has not been tried on a GPU.

    Args:
        train: a function whose first argument is a :class:`TorchState`. It creates what belongs to a world, such as
            DistributedDataParallel, each time.

    Returns:
        The function with the same arguments and the same result. When the training has ended, the state is saved.
    """

    @functools.wraps(train)
    def train_in_worlds(state: _State, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if not isinstance(state, TorchState):
            raise TypeError(f"{train.__qualname__}() must get a TorchState first, not a {type(state).__name__}.")

        WORLDS.allows_nccl, WORLDS.stand_by = True, state.stand_by

        def train_in_world() -> _Result:
            state.restore()
            WORLDS.note_state()
            result = train(state, *args, **kwargs)
            WORLDS.check()
            state.save()
            return result

        return call_in_worlds(WORLDS, train_in_world)

    return train_in_worlds
