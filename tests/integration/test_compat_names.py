"""The names of torch.distributed.elastic under torchelastic's names: the same modules, or objects that work alike."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

pytestmark = pytest.mark.integration

PAIRS_OF_MODULES = """
        import importlib, pkgutil
        import torch.distributed.elastic, torch.distributed.launcher

        def modules():
            for package in (torch.distributed.elastic, torch.distributed.launcher):
                for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                    if not found.name.rpartition(".")[2].startswith("_"):
                        name = found.name.replace("torch.distributed.elastic", "torchelastic")
                        ours = importlib.import_module(name.replace("torch.distributed", "torchelastic"))
                        yield importlib.import_module(found.name), ours
        """
"""Defines `modules()`, which yields each public module of torch and its counterpart."""


def output_of(program: str) -> list[str]:
    """Run a program with the torch of the test, and return the lines of its output."""
    command = [sys.executable, "-c", dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.usefixtures("each_torch")
def test_every_public_module_and_name_of_torch_is_importable_under_torchelastics_name() -> None:
    missing = output_of(
        PAIRS_OF_MODULES
        + """
        import types

        def defined(module):
            listed = getattr(module, "__all__", None)
            return listed or [
                name
                for name, value in vars(module).items()
                if not name.startswith("_") and not isinstance(value, types.ModuleType)
                and getattr(value, "__module__", module.__name__).startswith("torch")
            ]

        checked = 0
        for torchs, ours in modules():
            for each in defined(torchs):
                if not hasattr(ours, each):
                    print(ours.__name__, each)
            checked += 1
        assert checked > 30
        """
    )
    assert missing == []


def test_every_public_object_has_the_members_and_the_parameters_of_torchs() -> None:
    missing = output_of(
        PAIRS_OF_MODULES
        + """
        import inspect

        def parameters(function):
            try:
                return [name for name in inspect.signature(function).parameters if name not in ("args", "kwargs")]
            except (TypeError, ValueError):
                return []

        def compare(name, torchs, ours):
            global checked
            if torchs is ours or not callable(torchs):
                return
            checked += 1
            if parameters(ours)[: len(parameters(torchs))] != parameters(torchs):
                print(name, parameters(torchs), parameters(ours))
            for member, value in inspect.getmembers(torchs) if isinstance(torchs, type) else ():
                if not member.startswith("_") and hasattr(ours, member):
                    compare(f"{name}.{member}", value, getattr(ours, member))
                elif not member.startswith("_") and (torchs.__name__, member) not in left_out:
                    print(name, member)

        left_out = {("WorkerState", "name"), ("WorkerState", "value")}  # members of each state
        # The agent records no events.
        events = ("get_event_failed", "get_event_succeeded", "record_duration")
        left_out |= {("LocalElasticAgent", name) for name in events}
        checked = 0
        for torchs, ours in modules():
            for each in getattr(torchs, "__all__", vars(torchs)):
                if not each.startswith("_") and hasattr(ours, each):
                    compare(f"{ours.__name__}.{each}", getattr(torchs, each), getattr(ours, each))
        assert checked > 50, checked
        """
    )
    assert missing == []


def test_the_functions_of_torchrun_and_of_the_first_launcher_have_torchs_parameters() -> None:
    output_of(
        """
        import inspect
        import torch.distributed.run as torchs
        import torchelastic.distributed.launch as first
        import torchelastic.run as ours
        from torchelastic.rendezvous import RendezvousHandlerFactory, RendezvousParameters

        for name in (
            "config_from_args", "determine_local_world_size", "get_args_parser", "main", "parse_args",
            "parse_min_max_nnodes", "run",
        ):
            assert [*inspect.signature(getattr(ours, name)).parameters] == [
                *inspect.signature(getattr(torchs, name)).parameters
            ], name
        assert (first.run, first.parse_args, first.parse_min_max_nnodes) == (
            ours.run, ours.parse_args, ours.parse_min_max_nnodes
        )
        factory = RendezvousHandlerFactory()
        factory.register("mine", lambda parameters: parameters.run_id)
        assert factory.create_handler(RendezvousParameters("mine", "", "digits-7", 1, 1)) == "digits-7"
        """
    )


def test_a_custom_handler_needs_only_the_fields_of_an_older_torchs_worker_spec() -> None:
    lines = output_of(
        """
        import dataclasses
        import torch.distributed.elastic.agent.server.api as api

        newer = ("event_log_handler", "virtual_local_rank", "duplicate_stdout_filters", "duplicate_stderr_filters")
        older = [
            (each.name, each.type, dataclasses.field(default=each.default))
            for each in dataclasses.fields(api.WorkerSpec)
            if each.name not in (*newer, "numa_options")
        ]
        api.WorkerSpec = dataclasses.make_dataclass("WorkerSpec", older)
        from torchelastic.agent.server import WorkerSpec
        from torchelastic.agent.server.torch_agent import TorchAgent
        from torchelastic.config.settings import LogSettings

        for more in ({}, *({name: "used"} for name in newer)):
            try:
                spec = WorkerSpec(fn=print, rdzv_handler=object(), max_restarts=7, **more)
                print(TorchAgent(spec, LogSettings(), 1.0, print).get_worker_group().spec.max_restarts)
            except Exception as error:
                print(error)
        """
    )
    names = ("event_log_handler", "virtual_local_rank", "duplicate_stdout_filters", "duplicate_stderr_filters")
    assert lines == ["7", *(f"WorkerSpec.{name} needs a newer torch: remove it, or update torch." for name in names)]


@pytest.mark.parametrize(
    "module",
    [
        "agent.server.health_check_server",
        "events.handlers",
        "multiprocessing.api",
        "multiprocessing.errors.error_handler",
        "multiprocessing.errors.handlers",
        "multiprocessing.redirects",
        "multiprocessing.tail_log",
        "rendezvous.dynamic_rendezvous",
        "rendezvous.etcd_rendezvous",
        "rendezvous.etcd_server",
        "timer.local_timer",
        "utils.data.elastic_distributed_sampler",
        "utils.logging",
    ],
)
def test_a_module_that_torchelastic_does_not_replace_is_torchs_own(module: str) -> None:
    output_of(
        f"""
        import torchelastic.{module} as ours
        import torch.distributed.elastic.{module} as torchs
        assert ours is torchs
        assert torchs.__spec__.name == torchs.__name__
        """
    )


def test_programs_of_torchelastic_0_1_find_its_names() -> None:
    output_of(
        """
        from torchelastic.checkpoint.api import CheckpointUtil, set_checkpoint_manager
        from torchelastic.checkpoint.file_system_checkpoint import FileSystemCheckpointManager
        import torchelastic.p2p.coordinator_p2p
        from torchelastic import rendezvous
        from torchelastic.coordinator import NonRetryableException
        from torchelastic.rendezvous.api import RendezvousClosedException, RendezvousTimeoutException
        from torchelastic.rendezvous import RendezvousException, RendezvousNonRetryableError
        from torchelastic.train_loop import run_train
        import torchelastic.checkpoint

        assert torchelastic.checkpoint.FileSystemCheckpointManager is FileSystemCheckpointManager
        assert torchelastic.checkpoint.set_checkpoint_manager is set_checkpoint_manager
        assert torchelastic.p2p.coordinator_p2p is torchelastic.p2p
        assert torchelastic.NonRetryableException is NonRetryableException
        for old in (RendezvousClosedException, RendezvousTimeoutException, RendezvousNonRetryableError):
            try:
                raise old("the run has ended")
            except rendezvous.RendezvousError as error:
                assert isinstance(error, RendezvousException)
        assert rendezvous.RendezvousClosedError is RendezvousClosedException
        assert rendezvous.RendezvousTimeoutError is RendezvousTimeoutException
        try:
            import torchelastic.p2p.nothing
        except ModuleNotFoundError as error:
            assert error.name == "torchelastic.p2p.nothing"
        """
    )


def test_a_module_of_torch_can_be_run_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "torchelastic.utils.logging"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_modules_that_torch_does_not_have_are_not_found_and_importing_torchelastic_imports_no_torch() -> None:
    lines = output_of(
        """
        import sys
        from importlib.util import find_spec
        import torchelastic, torchelastic.agent.server, torchelastic.metrics, torchelastic.rendezvous.registry
        print(torchelastic.__version__)
        assert "torch" not in sys.modules
        for name in ("torchelastic.nothing", "torchelastic.utils.nothing", "torchelastic.rendezvous.nothing"):
            assert find_spec(name) is None
            try:
                __import__(name)
            except ModuleNotFoundError as error:
                print(error.name)
        for module in (torchelastic, torchelastic.agent.server, torchelastic.rendezvous.api):
            assert not hasattr(module, "nothing")
        """
    )
    version, *names = lines
    assert version[0].isdigit()
    assert names == ["torchelastic.nothing", "torchelastic.utils.nothing", "torchelastic.rendezvous.nothing"]


@pytest.mark.usefixtures("each_torch")
def test_samplers_iterators_loggers_and_handlers_work() -> None:
    output_of(
        """
        import logging
        from torchelastic.rendezvous import RendezvousParameters
        from torchelastic.rendezvous.registry import get_rendezvous_handler
        from torchelastic.utils.data import CyclingIterator, ElasticDistributedSampler
        from torchelastic.utils.logging import get_logger

        read = [[*ElasticDistributedSampler(range(10), num_replicas=2, rank=rank, start_index=4)] for rank in (0, 1)]
        assert sorted(sum(read, [])) == [*range(4, 10)]
        assert [*CyclingIterator(n=2, generator_fn=lambda epoch: iter([epoch, epoch]))] == [0, 0, 1, 1]
        assert get_logger("mine") is logging.getLogger("mine")
        for backend in ("torchelastic", "c10d", "static"):
            at = "" if backend == "torchelastic" else "127.0.0.1:0"
            handler = get_rendezvous_handler(RendezvousParameters(backend, at, "digits-7", 1, 1, rank=0))
            assert handler.get_run_id() == "digits-7"
        """
    )


RECORD = """
    import {package}.metrics as metrics
    from {package}.metrics.api import MetricHandler, MetricStream

    class Collected(MetricHandler):
        def emit(self, data):
            print(data.group_name, data.name, data.value if "duration" not in data.name else "")

    metrics.configure(Collected(), "configured")

    @metrics.profile("configured")
    def fails():
        raise LookupError

    @metrics.profile(group="configured")
    def works():
        return 7

    assert works() == 7
    try:
        fails()
    except LookupError:
        print("raised")
    metrics.publish_metric("configured", "loss", 3)
    MetricStream("other", Collected()).add_value("steps", 4)
    metrics.getStream("none").add_value("dropped", 5)
    """


def test_older_functions_for_metrics_record_the_same_values_as_torchs() -> None:
    ours, torchs = (
        output_of(RECORD.format(package=package)) for package in ("torchelastic", "torch.distributed.elastic")
    )
    assert ours == torchs
    assert "other steps 4" in ours


def test_events_reach_the_handler_of_their_type_and_torchs_destination() -> None:
    lines = output_of(
        """
        from torchelastic import events

        class Collected(events.EventHandler):
            def record(self, event):
                print("collected", event.name, event.metadata)

        events.configure(Collected())
        events.configure(events.ConsoleEventHandler(), "other")
        events.configure(events.NullEventHandler(), "dropped")
        events.record(events.Event("torchs", events.EventSource.WORKER, metadata={"step": 1}))
        events.record("older", metadata={"step": 2})
        events.record_event(events.Event("printed", "other"))
        for kind in ("other", "dropped", "unknown"):
            events.record("named", kind)
        """
    )
    assert lines[:2] == ["collected torchs {'step': 1}", "collected older {'step': 2}"]
    assert [line.partition('"name": ')[2].partition(",")[0] for line in lines[2:]] == ['"printed"', '"named"']
