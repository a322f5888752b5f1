"""The state of a training program, which survives changes of the world: see :class:`TorchState`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from torchelastic.training.notices import answer_notice, ask_for_notice, notice
from torchelastic.training.progress import heartbeat, step
from torchelastic.training.world import WORLDS, WorldChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from torchelastic.training.checkpointer import Checkpointer
    from torchelastic.training.sampler import ElasticSampler

_PLAIN: Final = (type(None), bool, int, float, str)


class TorchState:
    """The state of a training program: what a worker needs to continue where other workers were.

    ::

        state = torchelastic.TorchState(
            model=model,
            optimizer=optimizer,
            data=DataLoader(dataset, batch_sampler=torchelastic.ElasticSampler(dataset, batch_size=64)),
            best=0.0,
            checkpointer=torchelastic.Checkpointer(every=100),
        )

    Each value is an attribute. A value with ``state_dict()`` and ``load_state_dict()``, such as a module, an optimizer,
    a scheduler, a gradient scaler or an :class:`ElasticSampler`, is saved with these methods; a DataLoader by the
    ElasticSampler that is its batch sampler. Any other value is plain: a number, a string, a tensor, None, or a list, a
    tuple or a dictionary of these. Pass the module itself, not the DistributedDataParallel that contains it.

    Args:
        checkpointer: saves the state at each :meth:`commit` that is due, and before planned changes. Without one, a
            worker that starts again begins from the start.
        values: the values by name.

    Attributes:
        commits: the number of steps that are complete.

    Raises:
        TypeError: a value can be neither saved nor loaded; the message names it.
    """

    commits: int
    _checkpointer: Checkpointer | None
    _values: dict[str, Any]
    _is_live: bool
    _has_stepped: bool

    def __init__(self, *, checkpointer: Checkpointer | None = None, **values: Any) -> None:  # noqa: ANN401 - any kind
        import torch

        for name, value in values.items():
            _check(name, value)
            if hasattr(type(self), name) or name.startswith("_"):
                raise TypeError(f"{name} cannot be the name of a value of TorchState: choose another one.")
        self.__dict__.update(commits=0, _checkpointer=checkpointer, _values=values, _is_live=False, _has_stepped=False)
        for value in values.values():
            if isinstance(value, torch.optim.Optimizer):
                value.register_step_post_hook(lambda *_: self.__dict__.update(_has_stepped=True))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the program's values
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"TorchState has no value {name}: pass it, as in TorchState({name}=…).") from None

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - likewise
        if name == "commits":
            raise AttributeError("The number of commits cannot be set: call commit() at the end of each step.")
        getattr(self, name)
        _check(name, value)
        self._values[name] = value

    def commit(self) -> None:
        """End a training step: count it, move each sampler to its next batch, and save the state if that is due.

        A change of the world takes effect here: the function of :func:`elastic` is left, and called again in the next
        world. Nothing that the ranks do together, such as a reduction of the loss, may come between the optimizer's
        step and the commit: if it failed, the step would be done twice.
        """
        self.__dict__.update(commits=self.commits + 1, _has_stepped=False)
        for value in self._values.values():
            if (sampler := _sampler(value)) is not None:
                sampler.advance()
        if self._checkpointer is not None:
            change_ahead = notice() is not None
            self._checkpointer.save(self.commits, self.state_dict, force=change_ahead)
            if change_ahead:
                self._checkpointer.wait()
                answer_notice()
        heartbeat()
        if WORLDS.changed:
            raise WorldChanged
        step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: the number of commits, and the state of each value. Tensors are not copied."""
        return {"commits": self.commits, "values": {name: _saved(value) for name, value in self._values.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that :meth:`state_dict` of the same program has returned.

        Raises:
            ValueError: the state has other values; the message names them.
        """
        values = state["values"]
        if different := sorted({*values} ^ {*self._values}):
            raise ValueError(
                f"the saved state and TorchState differ in {', '.join(different)}: start with another folder for "
                "checkpoints, or pass the same values."
            )
        for name, saved in values.items():
            value = self._values[name]
            if (loadable := _loadable(value)) is not None:
                loadable.load_state_dict(saved)
            else:
                self._values[name] = saved
        self.__dict__["commits"] = state["commits"]

    def restore(self) -> None:
        """Bring all ranks to the same state; all ranks call this together, and :func:`elastic` does.

        The state is that of the rank with the most commits, of those that have trained. If none has, it is the newest
        checkpoint; without one, the state of rank 0.
        """
        import torch.distributed as dist

        # A rank that failed between the optimizer's step and its commit has parameters of no commit.
        own = (int(self._is_live), self.commits, int(not self._has_stepped))
        ranks = _gathered(*own)
        source = max(range(len(ranks)), key=lambda rank: (ranks[rank], -rank))
        if ranks[source][0]:
            if self._checkpointer is not None:
                self._checkpointer.join()
            differ = len({*ranks}) > 1
        else:
            saved = None if self._checkpointer is None else self._checkpointer.load()
            if saved is not None:
                self.load_state_dict(saved)
            differ = saved is None and len(ranks) > 1
        if differ:
            state = broadcast(self.state_dict() if dist.get_rank() == source else None, source)
            if dist.get_rank() != source:
                self.load_state_dict(state)
        self.__dict__.update(_is_live=True, _has_stepped=False)
        if self._checkpointer is not None:
            ask_for_notice()
        step()

    def save(self) -> None:
        """Save the state if its last commit is not saved, and wait until it is written."""
        if self._checkpointer is not None:
            self._checkpointer.save(self.commits, self.state_dict, force=True)
            self._checkpointer.wait()


def broadcast(state: Any, source: int) -> Any:  # noqa: ANN401 - nested dictionaries, lists and tuples
    """Return the nested values and tensors that one rank passes; the others pass None. All ranks call this together.

    Args:
        state: dictionaries, lists and tuples of tensors and plain values.
        source: the rank.

    Returns:
        The state. On the other ranks, its tensors are those of the group's device.
    """
    import torch
    import torch.distributed as dist

    device = _device()
    content = io.BytesIO()
    if dist.get_rank() == source:
        torch.save(_mapped(state, lambda tensor: tensor.detach().to("meta")), content)
    size = torch.tensor([content.tell()], device=device)
    dist.broadcast(size, source)
    data = torch.frombuffer(bytearray(content.getvalue() or int(size)), dtype=torch.uint8).to(device)
    dist.broadcast(data, source)
    if dist.get_rank() == source:
        _mapped(state, lambda tensor: dist.broadcast(tensor.detach().to(device).contiguous(), source))
        return state
    form = torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=True)

    def received(tensor: torch.Tensor) -> torch.Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(result, source)
        return result

    return _mapped(form, received)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:  # noqa: ANN401 - nested values
    """Return the value with each tensor replaced by the result of a function, in a fixed order."""
    import torch

    match value:
        case torch.Tensor():
            return change(value)
        case dict():
            return {key: _mapped(each, change) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_mapped(each, change) for each in value)
    return value


def _gathered(*values: int) -> list[tuple[int, ...]]:
    """Return the numbers that each rank passes, in the order of the ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [values]
    own = torch.tensor(values, dtype=torch.int64, device=_device())
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [tuple(each.tolist()) for each in found]


def _device() -> torch.device:
    """Return the device of the tensors that the default process group sends."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sampler(value: Any) -> ElasticSampler | None:  # noqa: ANN401 - any value
    from torchelastic.training.sampler import ElasticSampler

    sampler = value if isinstance(value, ElasticSampler) else getattr(value, "batch_sampler", None)
    return sampler if isinstance(sampler, ElasticSampler) else None


def _loadable(value: Any) -> Any:  # noqa: ANN401 - any value
    """Return the object that saves and loads itself; None for a plain value."""
    if (sampler := _sampler(value)) is not None:
        return sampler
    return value if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else None


def _saved(value: Any) -> Any:  # noqa: ANN401 - any value
    loadable = _loadable(value)
    return value if loadable is None else loadable.state_dict()


def _check(name: str, value: Any) -> None:  # noqa: ANN401 - any value
    import torch

    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(f"{name} is a DistributedDataParallel: pass the module that it contains.")
    if isinstance(value, torch.utils.data.DataLoader) and _sampler(value) is None:
        raise TypeError(
            f"{name} is a DataLoader without an ElasticSampler, so its position is unknown: pass "
            "DataLoader(dataset, batch_sampler=torchelastic.ElasticSampler(dataset, batch_size=…))."
        )
    if _loadable(value) is None and (found := next(_not_plain(value), None)) is not None:
        raise TypeError(
            f"{name} contains an object of the type {type(found).__name__}, which has no state_dict() and "
            "load_state_dict(): TorchState cannot save it."
        )


def _not_plain(value: Any) -> Iterator[Any]:  # noqa: ANN401 - any value
    import torch

    match value:
        case dict():
            for key, each in value.items():
                yield from _not_plain(key)
                yield from _not_plain(each)
        case list() | tuple():
            for each in value:
                yield from _not_plain(each)
        case _ if type(value) not in _PLAIN and not isinstance(value, torch.Tensor):
            yield value
