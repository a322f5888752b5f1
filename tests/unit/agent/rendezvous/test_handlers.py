"""The Python API for launchers: names, rendezvous parameters, worker specs and their errors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from torchelastic import LocalElasticAgent, RunResult, WorkerSpec, WorkerState
from torchelastic.errors import SettingsError
from torchelastic.protocol.pod import Env
from torchelastic.rendezvous import (
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
)
from torchelastic.rendezvous.handler import ElasticRendezvousHandler

if TYPE_CHECKING:
    from collections.abc import Callable


class OneNode(RendezvousHandler):
    """A handler with the required method only."""

    def next_rendezvous(self) -> Any:
        return "store", 0, 1


def parameters(**changes: Any) -> RendezvousParameters:
    given: dict[str, Any] = {
        "backend": "torchelastic",
        "endpoint": "etcd:2379",
        "run_id": "digits-7",
        "min_nodes": 1,
        "max_nodes": 4,
    }
    return RendezvousParameters(**{**given, **changes})


def test_imports_load_no_heavy_modules_and_every_public_name_exists() -> None:
    program = """
import sys
before = set(sys.modules)
import torchelastic
heavy = {"torch", "aiohttp", "msgspec", "asyncio", "prometheus_client", "torchelastic.agent"}
assert not heavy & (set(sys.modules) - before)
torchelastic.heartbeat, torchelastic.is_round_current
assert not {"torch", "aiohttp", "prometheus_client", "torchelastic.agent"} & set(sys.modules)
from importlib.metadata import entry_points
before = set(sys.modules)
assert callable(entry_points(group="torchrun.handlers")["torchelastic"].load()())
assert not heavy & (set(sys.modules) - before)
for name in {*torchelastic.__all__} - {"ElasticSampler"}:
    getattr(torchelastic, name)
assert "torch" not in sys.modules
assert torchelastic.ElasticSampler is sys.modules["torchelastic.training.sampler"].ElasticSampler
assert "LaunchConfig" in dir(torchelastic)
assert not hasattr(torchelastic, "no_such_name")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_handler_needs_one_method_and_an_info_unpacks_like_a_tuple() -> None:
    handler = OneNode()
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.get_backend() == "OneNode"
    handler.set_closed()
    store: Any = object()
    assert tuple(RendezvousInfo(store, 1, 2)) == (store, 1, 2)


def test_rendezvous_parameters_convert_values_as_torch_does() -> None:
    given = parameters(switch="True", off=0, count="12", odd="perhaps")
    assert (given.get("switch"), given.get_as_bool("switch"), given.get_as_bool("off")) == ("True", True, False)
    assert given.get_as_bool("absent", True)
    assert (given.get_as_int("count"), given.get_as_int("absent")) == (12, None)
    for read in (given.get_as_bool, given.get_as_int):
        with pytest.raises(ValueError, match="'perhaps'"):
            read("odd")


def test_the_registry_creates_registered_handlers_and_refuses_duplicate_names() -> None:
    registry = RendezvousHandlerRegistry()

    def create(params: RendezvousParameters) -> RendezvousHandler:
        assert params.run_id == "digits-7"
        return OneNode()

    registry.register("mine", create)
    registry.register("mine", create)
    with pytest.raises(ValueError, match="another rendezvous handler with the name mine"):
        registry.register("mine", lambda _: OneNode())
    assert isinstance(registry.create_handler(parameters(backend="mine")), OneNode)
    handler = registry.create_handler(parameters())
    assert isinstance(handler, ElasticRendezvousHandler)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("torchelastic", "digits-7", True)


def test_rendezvous_parameters_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parameters(
        timeout=900, last_call_timeout="3", lease=2.5, local_addr="10.0.0.7", password="a,b", username="c"
    )
    settings = ElasticRendezvousHandler(given).settings
    rules = settings.rendezvous
    assert (rules.run_id, rules.join_timeout, rules.last_call_timeout, rules.lease) == ("digits-7", 900, 3, 2.5)
    assert (rules.size.min, rules.size.max, rules.size.desired) == (1, 4, None)
    assert settings.store is not None
    assert (settings.store.endpoints, settings.store.password) == (("etcd:2379",), "a,b")
    assert settings.address == "10.0.0.7"
    # torch's launcher adds timeout, so join_timeout takes precedence.
    given = parameters(join_timeout=5, timeout=900, rank=0)
    assert ElasticRendezvousHandler(given).settings.rendezvous.join_timeout == 5
    one_node = ElasticRendezvousHandler(parameters(endpoint="", run_id="", max_nodes=1)).settings
    assert (one_node.store, one_node.address, bool(one_node.rendezvous.run_id)) == (None, "127.0.0.1", True)
    for name, value in ((Env.SIZE, '{"min":2,"max":3,"desired":3}'), (Env.NODE_NAME, "a"), (Env.NODE_ADDRESS, "::1")):
        monkeypatch.setenv(name, value)
    operated = ElasticRendezvousHandler(parameters()).settings
    assert (operated.rendezvous.size.desired, operated.node_name, operated.address) == (3, "a", "::1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": ""}, "is empty"),
        ({"min_nodes": 0}, "at least one node"),
        ({"min_nodes": 5}, "max_nodes=4 is below min_nodes=5"),
        ({"endpoint": ""}, "needs the address of one of them"),
        ({"run_id": ""}, "--rdzv-id is missing"),
        ({"endpoint": "etcd:99999"}, "has the port 99999"),
        ({"lesae": 1}, "Did you mean lease"),
        ({"lease": "long"}, "must be a time in seconds"),
    ],
)
def test_unsupported_handler_parameters_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((SettingsError, ValueError), match=words):
        ElasticRendezvousHandler(parameters(**changes))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: WorkerSpec(), "entrypoint is not set"),
        (lambda: WorkerSpec(fn=print, entrypoint="python"), "both fn and entrypoint"),
        (lambda: WorkerSpec(fn=print, local_world_size=0), "at least one worker"),
        (
            lambda: WorkerSpec(fn=print, monitor_interval=-1),
            "WorkerSpec.monitor_interval=-1: must be a time in seconds",
        ),
        (
            lambda: WorkerSpec(fn=print, heartbeat_timeout=0),
            "WorkerSpec.heartbeat_timeout=0: must be a time in seconds",
        ),
        (lambda: LocalElasticAgent(WorkerSpec(fn=print), exit_barrier_timeout=-1), "exit_barrier_timeout=-1: must be"),
        (lambda: LocalElasticAgent(WorkerSpec(fn=print), start_method="thread"), "fork-server or exec"),
        (lambda: LocalElasticAgent(WorkerSpec(fn=print), shutdown_timeout=-1), "shutdown_timeout=-1: must be a time"),
        (lambda: LocalElasticAgent(WorkerSpec(fn=print, tee=3), DefaultLogsSpecs(os.devnull)), "remove log_dir"),
        (lambda: LocalElasticAgent(WorkerSpec(fn=print, tee=4)), "0 .none., 1"),
        (lambda: LocalElasticAgent(WorkerSpec(fn=print, tee={1: 3})), "there is no local rank 1"),
    ],
)
def test_an_invalid_worker_spec_is_explained(make: Callable[[], object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_results_have_torchs_methods() -> None:
    assert not RunResult(WorkerState.SUCCEEDED, {0: 1}).is_failed()
    assert RunResult(WorkerState.FAILED).is_failed()
    assert WorkerState.is_running(WorkerState.HEALTHY)
