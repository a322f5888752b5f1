"""``TorchState``: what it takes, and what a program may do with it, in one process."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import torchelastic

if TYPE_CHECKING:
    from pathlib import Path


class Point(NamedTuple):
    x: int
    y: int


def made(**more: Any) -> torchelastic.TorchState:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    sampler = torchelastic.ElasticSampler(10, 4)
    loader = DataLoader(range(10), batch_sampler=sampler)  # type: ignore[arg-type] # a sequence will do
    return torchelastic.TorchState(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), data=loader, best=[1.5, "a"], **more
    )


def train_one_step(state: torchelastic.TorchState) -> None:
    state.model(torch.ones(2)).sum().backward()
    state.optimizer.step()
    state.best = [2.5, "b"]
    state.commit()


def test_a_state_is_loaded_as_it_was_saved() -> None:
    trained, fresh = made(), made()
    train_one_step(trained)
    fresh.load_state_dict(trained.state_dict())
    assert (fresh.commits, fresh.best, fresh.data.batch_sampler.position) == (1, [2.5, "b"], 4)
    assert torch.equal(fresh.model.weight, trained.model.weight)
    assert fresh.optimizer.state_dict()["state"][0]["step"] == 1


def test_a_program_continues_from_its_checkpoint(tmp_path: Any) -> None:
    for commits in (1, 2):
        state = made(checkpointer=torchelastic.Checkpointer(tmp_path))

        @torchelastic.elastic
        def train(state: torchelastic.TorchState, more: int) -> int:
            train_one_step(state)
            return state.commits + more

        assert train(state, 10) == commits + 10


def test_a_sampler_moves_once_in_each_step_even_if_the_state_has_it_twice_or_gets_it_later() -> None:
    first, second = torchelastic.ElasticSampler(10, 4), torchelastic.ElasticSampler(10, 4)
    state = torchelastic.TorchState(data=DataLoader([0] * 10, batch_sampler=first), sampler=first)  # type: ignore[arg-type] # likewise
    state.commit()
    state.sampler = second
    state.commit()
    assert (first.position, second.position) == (8, 4)


TERMINATED = """
import os, signal, sys
import torch
import torchelastic

@torchelastic.elastic
def train(state):
    while state.commits < 5:
        if state.commits == 2:
            if os.fork() == 0:
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGTERM  # not of this process
            os.kill(os.getpid(), signal.SIGTERM)
        state.commit()

torch.set_num_threads(1)
train(torchelastic.TorchState(checkpointer=torchelastic.Checkpointer(sys.argv[1], every=100)))
"""


def test_a_process_without_an_agent_saves_its_state_when_it_is_terminated(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TERMINATED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGTERM, ended
    assert (torchelastic.Checkpointer(tmp_path).load() or {})["commits"] == 3
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    assert (torchelastic.Checkpointer(tmp_path).load() or {})["commits"] == 5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "value is a object, which .* Or pass an object with state_dict"),
        ([{"a": Point(1, 2)}], r"value\[0\]\['a'\] is a Point"),
        (DataLoader([1, 2]), "value is a DataLoader without an ElasticSampler"),  # type: ignore[arg-type] # likewise
    ],
)
def test_a_value_that_cannot_be_saved_is_refused(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        torchelastic.TorchState(value=value)
    with pytest.raises(TypeError, match=message):
        torchelastic.TorchState(value=0).value = value


def test_a_name_that_is_not_part_of_the_state_is_refused() -> None:
    state = torchelastic.TorchState(step=0)
    with pytest.raises(AttributeError, match=r"no value steps: pass it, as in TorchState\(steps=…\)"):
        state.steps = 1
    with pytest.raises(AttributeError, match="cannot be set: call commit"):
        state.commits = 1
    with pytest.raises(TypeError, match="commit cannot be the name of a value"):
        torchelastic.TorchState(commit=1)


def test_a_checkpoint_of_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in best, data, model, optimizer, step: start with another folder"):
        torchelastic.TorchState(step=0).load_state_dict(made().state_dict())


@pytest.mark.parametrize("value", ["true", "2", " 1"])
def test_staying_with_nccl_is_either_on_or_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train = torchelastic.elastic(train_one_step)
    for accepted in ("", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_NCCL_IN_PLACE", accepted)
        train(made())
    monkeypatch.setenv("TORCHELASTIC_NCCL_IN_PLACE", value)
    with pytest.raises(
        torchelastic.NonRetryableException,
        match=f"^TORCHELASTIC_NCCL_IN_PLACE={value}: must be 1 for on or 0 for off.$",
    ):
        train(made())


def test_a_function_without_a_state_is_refused() -> None:
    @torchelastic.elastic
    def train(state: torchelastic.TorchState) -> None:
        raise AssertionError(state)

    with pytest.raises(TypeError, match=r"train\(\) must get a TorchState first, not a int"):
        train(3)  # type: ignore[type-var]
