"""The state of a training program, which survives changes of the world: see :class:`TorchState`."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

from torchelastic.protocol.worker import is_worker
from torchelastic.training.agent_worlds import WORLDS
from torchelastic.training.collectives import Ranks
from torchelastic.training.errors import NonRetryableException
from torchelastic.training.nccl import IN_PLACE
from torchelastic.training.nested import checksum, is_sharded, map_tensors
from torchelastic.training.notices import answer_notice, ask_for_notice, notice
from torchelastic.training.progress import heartbeat, step
from torchelastic.training.shards import sharded_tensors
from torchelastic.training.worlds import WorldChanged

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from torchelastic.training.checkpointer import Checkpointer
    from torchelastic.training.sampler import ElasticSampler

_PARTIAL: Final = 0
_INITIAL: Final = 1
_TRAINED: Final = 2
"""What a rank has: a part of the state of a rank that was lost while it sent it, or what NCCL has left of a state; its
first state; or a trained one."""


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
    _samplers: list[ElasticSampler]
    _sigterm: _Sigterm
    _kind: int
    _has_stepped: bool
    _is_at_commit: bool

    def __init__(self, *, checkpointer: Checkpointer | None = None, **values: Any) -> None:  # noqa: ANN401 - any kind
        import torch

        for name, value in values.items():
            _check(name, value)
            if hasattr(type(self), name) or name.startswith("_"):
                raise TypeError(f"{name} cannot be the name of a value of TorchState: choose another one.")
        self.__dict__.update(commits=0, _checkpointer=checkpointer, _values=values)
        self.__dict__.update(_kind=_INITIAL, _has_stepped=False, _is_at_commit=False)
        self.__dict__["_sigterm"] = _Sigterm()
        self._find_samplers()
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
        self._find_samplers()

    def _find_samplers(self) -> None:
        found = {id(sampler): sampler for value in self._values.values() if (sampler := _sampler(value)) is not None}
        self.__dict__["_samplers"] = [*found.values()]

    def commit(self) -> None:
        """End a training step: count it, move each sampler to its next batch, and save the state if that is due.

        A change of the world takes effect here: the function of :func:`elastic` is left, and called again in the next
        world. Nothing that the ranks do together, such as a reduction of the loss, may come between the optimizer's
        step and the commit: if it failed, the step would be done twice.
        """
        WORLDS.check()
        self.__dict__.update(commits=self.commits + 1, _has_stepped=False)
        for sampler in self._samplers:
            sampler.advance()
        if self._checkpointer is not None:
            change_ahead = notice() is not None or self._sigterm.received
            self._checkpointer.save(self.commits, self.state_dict, force=change_ahead)
            if change_ahead:
                self._checkpointer.wait()
                answer_notice()
                self._sigterm.end()
        heartbeat()
        if WORLDS.changes_at_commit():
            self.__dict__["_is_at_commit"] = True
            raise WorldChanged
        step(self.commits)

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
        self._load(values)
        self.__dict__["commits"] = state["commits"]

    def _load(self, values: Mapping[str, Any], **arguments: bool) -> None:
        import torch

        for name, saved in values.items():
            value = self._values[name]
            if (loadable := _loadable(value)) is not None:
                loadable.load_state_dict(saved, **(arguments if isinstance(value, torch.nn.Module) else {}))
            else:
                self._values[name] = _on_devices_of(value, saved, name)

    def _changed_by_forward(self) -> dict[str, Any]:
        """Return what a step may change before the optimizer's step: all but parameters and the optimizers' states."""
        import torch

        values: dict[str, Any] = {}
        for name, value in self._values.items():
            if isinstance(value, torch.nn.Module):
                parameters = {each for each, _ in value.named_parameters(remove_duplicate=False)}
                values[name] = {each: saved for each, saved in value.state_dict().items() if each not in parameters}
            elif not isinstance(value, torch.optim.Optimizer):
                values[name] = _saved(value)
        return values

    def restore(self) -> None:
        """Bring all ranks to the same state; all ranks call this together, and :func:`elastic` does.

        The state is that of the rank with the most commits, of those that have trained; of these, that of a rank that
        has left its world in :meth:`commit`, not within a step. If none has trained, it is the newest checkpoint;
        without one, the state of rank 0. With NCCL, a rank whose world was broken has not trained.

        Nothing is sent if all ranks have left their world in the same commit. If all ranks have as many commits, the
        parameters and the optimizers' states are not sent. The rest is, unless it is small and alike: the forward
        passes of the step that is repeated may have changed the buffers of BatchNorm in different ways. If all ranks
        have begun that step, the buffers see it twice, on all ranks alike. In any other case, the whole state is sent.

        Raises:
            TypeError: a value of the state cannot be sent, or is sharded, and the world has changed.
            RuntimeError: a rank was lost meanwhile; or no rank has the whole state or the first one, and there is no
                checkpoint.
            NonRetryableException: NCCL is to be used in place, and there is no checkpointer.
        """
        ranks = self._ranks_with_nccl() if WORLDS.uses_nccl else Ranks()
        # A rank that failed within a step may have other buffers than the others.
        rest = checksum(self._changed_by_forward()) if ranks.size > 1 and self._kind == _TRAINED else None
        # A rank that failed between the optimizer's step and its commit has parameters of no commit.
        has_whole = int(not self._has_stepped)
        own = (self._kind, self.commits, has_whole, int(self._is_at_commit), -1 if rest is None else rest)
        found = WORLDS.gather(*own) or ranks.gather(*own)
        source = max(range(ranks.size), key=lambda rank: (found[rank][:4], -rank))
        kind, _, has_whole_step, is_at_commit, _ = found[source]
        is_alike = kind == _TRAINED and has_whole_step == 1 and len({each[:3] for each in found}) == 1
        is_same = is_alike and rest is not None and len({each[4] for each in found}) == 1
        saved = None
        if kind == _TRAINED:
            self._check_that_it_can_move()
            if self._checkpointer is not None:
                ask_for_notice()
                self._checkpointer.join()
        elif self._checkpointer is not None and (saved := self._checkpointer.load(self.state_dict())) is not None:
            self.load_state_dict(saved)
        elif kind == _PARTIAL:
            raise RuntimeError("The state was lost with a rank, and there is no checkpoint.")
        if saved is None and not is_same and not (is_at_commit and len({each[:4] for each in found}) == 1):
            if ranks.rank != source:
                self.__dict__.update(_kind=kind if own[:3] == found[source][:3] else _PARTIAL, _is_at_commit=False)
            state = ranks.broadcast(self._changed_by_forward() if is_alike else self.state_dict(), source)
            if ranks.rank != source and is_alike:
                self._load(state, strict=False)
            elif ranks.rank != source:
                self.load_state_dict(state)
        self.__dict__.update(_kind=_TRAINED, _has_stepped=False, _is_at_commit=False)
        if kind != _TRAINED and self._checkpointer is not None:
            ask_for_notice()
            if saved is None and WORLDS.uses_nccl:  # there must be a state to go back to
                self._checkpointer.save(self.commits, self.state_dict, force=True)
        self._catch_sigterm(ranks)
        step(self.commits)

    def stand_by(self, address: str) -> None:
        """Receive copies of the state while this process waits on a spare node; see :meth:`Checkpointer.stand_by`."""
        if self._checkpointer is not None:
            self._checkpointer.stand_by(address)

    def _catch_sigterm(self, ranks: Ranks) -> None:
        if self._checkpointer is not None and ranks.size == 1 and not is_worker():
            self._sigterm.catch()

    def _ranks_with_nccl(self) -> Ranks:
        """Return the ranks of the world, after the state of this rank is given up if collectives were aborted."""
        if self._checkpointer is None:
            raise NonRetryableException(
                f"{IN_PLACE}=1 needs a TorchState with a checkpointer: when a rank is lost, the others go back to the "
                "newest checkpoint or copy in memory."
            )
        if WORLDS.is_state_lost and self._kind == _TRAINED:
            self._check_that_it_can_move()
            self.__dict__.update(_kind=_PARTIAL, _has_stepped=False, _is_at_commit=False)
        return Ranks.on_host()

    def _check_that_it_can_move(self) -> None:
        import torch

        found: list[Any] = []
        others: list[Any] = []
        for value in self._values.values():
            if isinstance(value, torch.nn.Module):  # its state_dict() would take longer, while ranks wait
                found += [*value.parameters(), *value.buffers()]
            elif isinstance(value, torch.optim.Optimizer):
                found += [each for state in value.state.values() if isinstance(state, dict) for each in state.values()]
            else:
                others.append(_saved(value))
        if any(map(is_sharded, found)) or sharded_tensors(others):
            raise TypeError(
                "The state is sharded, so it cannot move to another world: call init_process_group() before the "
                "function of @elastic, and the workers restart from the last checkpoint."
            )

    def save(self) -> None:
        """Save the state if its last commit is not saved, and wait until it is written."""
        if self._checkpointer is not None:
            self._checkpointer.save(self.commits, self.state_dict, force=True)
            self._checkpointer.wait()
            self._sigterm.end()


class _Sigterm:
    """SIGTERM of a process that has neither an agent nor other ranks: it ends when the state is saved.

    Other ranks would wait for this one. A second SIGTERM ends the process at once.

    Attributes:
        received: whether the signal was received.
    """

    def __init__(self) -> None:
        self.received = False
        self._catches = False

    def catch(self) -> None:
        """Catch the signal if the program does not, and this is the main thread."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        owner = os.getpid()

        def take(*_: object) -> None:
            self.received = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if os.getpid() != owner:  # this is a fork, which has inherited the handler
                signal.raise_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, take)
        self._catches = True

    def end(self) -> None:
        """Leave the signal to its default, which ends this process if the signal was received."""
        if self._catches:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._catches = False
            if self.received:
                signal.raise_signal(signal.SIGTERM)


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


def _on_devices_of(value: Any, saved: Any, name: str) -> Any:  # noqa: ANN401 - plain values
    """Return a saved value, with each tensor on the device that the tensor at the same place in `value` has."""
    devices: dict[str, torch.device] = {}

    def note(tensor: torch.Tensor, name: str) -> torch.Tensor:
        devices[name] = tensor.device
        return tensor

    map_tensors(value, note, name)
    return map_tensors(saved, lambda tensor, each: tensor.to(devices.get(each, tensor.device)), name)


def _check(name: str, value: Any) -> None:  # noqa: ANN401 - any value
    import torch

    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(f"{name} is a DistributedDataParallel: pass the module that it contains.")
    if isinstance(value, torch.utils.data.DataLoader) and _sampler(value) is None:
        raise TypeError(
            f"{name} is a DataLoader without an ElasticSampler, so its position is unknown: pass "
            "DataLoader(dataset, batch_sampler=torchelastic.ElasticSampler(dataset, batch_size=…))."
        )
    if _loadable(value) is None:
        try:
            map_tensors(value, lambda tensor, _: tensor, name)
        except TypeError as error:
            raise TypeError(f"{error} Or pass an object with state_dict() and load_state_dict().") from None
