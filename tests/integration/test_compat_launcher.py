"""Launching functions from Python, with torchelastic's rendezvous and with others."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import uuid
from typing import TYPE_CHECKING

import pytest

from elastic_operator.local.processes import free_ports
from tests.support.agents import until_gone
from tests.support.launchers import Launcher, output_of, script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration


GUIDE = """
    from typing import Tuple
    from torchelastic import metrics
    from torchelastic.agent.server import WorkerSpec
    from torchelastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torchelastic.rendezvous import RendezvousHandler

    class MyRendezvousHandler(RendezvousHandler):
        def next_rendezvous(self) -> Tuple["torch.distributed.Store", int, int]:
            from torch.distributed import HashStore
            return HashStore(), 0, 1

    def train(words, times):
        dist = meet()
        return f"{words} " * times + str(dist.get_rank())

    if __name__ == "__main__":
        metrics.initialize_metrics()
        spec = WorkerSpec(
            local_world_size=2,
            fn=train,
            args=("hello from", 2),
            rdzv_handler=MyRendezvousHandler(),
            max_restarts=3,
            monitor_interval=1,
        )
        run_result = LocalElasticAgent(spec, start_method="fork").run(spec.role)
        if run_result.is_failed():
            print(f"worker 0 failed with: {run_result.failures[0]}")
        else:
            print(f"worker 0 return value is: {run_result.return_values[0]}")
            print(f"all are: {run_result.return_values}, state {run_result.state.name}")
"""


@pytest.mark.usefixtures("each_torch")
async def test_a_launcher_from_the_torch_customization_guide_runs(tmp_path: Path) -> None:
    output = await output_of(tmp_path, GUIDE)
    assert "worker 0 return value is: hello from hello from 0" in output
    assert "all are: {0: 'hello from hello from 0', 1: 'hello from hello from 1'}, state SUCCEEDED" in output
    assert "Warning" not in output


LAUNCH = """
    import json, logging
    from torchelastic.launcher.api import LaunchConfig, elastic_launch

    if __name__ == "__main__":
        logging.basicConfig(level=logging.INFO)
        config = LaunchConfig(**json.loads(sys.argv[1]))
        print("returned", elastic_launch(config, meet_and_stay)(sys.argv[2]), flush=True)
"""


def config(**values: object) -> str:
    """Return a LaunchConfig, as JSON."""
    import json

    asked = {
        "min_nodes": 2,
        "max_nodes": 2,
        "nproc_per_node": 1,
        "run_id": str(uuid.uuid4()),
        "local_addr": "127.0.0.1",
    }
    return json.dumps({**asked, **values})


@pytest.fixture
def configs(request: pytest.FixtureRequest, etcd: EtcdServer) -> tuple[str, str]:
    """The configurations of two nodes of one run, on the rendezvous of the test's parameter."""
    backend = getattr(request, "param", "torchelastic")
    run_id = str(uuid.uuid4())
    common = {"run_id": run_id, "rdzv_backend": backend, "rdzv_endpoint": f"127.0.0.1:{free_ports(1)[0]}"}
    match backend:
        case "torchelastic":
            one = config(**common | {"rdzv_endpoint": etcd.endpoint, "rdzv_configs": {"lease": 2}})
            return one, one
        case "static":
            one, two = (config(**common, rdzv_configs={"rank": rank, "timeout": 60}) for rank in (0, 1))
            return one, two
    one = config(**common, min_nodes=1, rdzv_configs={"last_call_timeout": 2})
    return one, one


BACKENDS = ["torchelastic", "c10d", "static"]


@pytest.mark.parametrize("configs", BACKENDS, indirect=True)
async def test_two_nodes_meet_restart_together_and_return_results(
    tmp_path: Path, stop: Path, configs: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    path = script(tmp_path, LAUNCH)
    async with Launcher(path, configs[0], stop) as a:
        if request.node.callspec.params["configs"] == "c10d":
            await a.wait_until_training(world=1)  # the other node joins later
        async with Launcher(path, configs[1], stop) as b:
            workers = await asyncio.gather(a.wait_until_training(world=2), b.wait_until_training(world=2))
            os.kill(workers[1], signal.SIGKILL)
            rounds = [(await each.wait_for_line(r"round (\d) rank \d of 2 pid \d+ restart 1"))[1] for each in (a, b)]
            assert rounds[0] == rounds[1]
            stop.touch()
            assert [await a.code(), await b.code()] == [0, 0]
    returned = {line for launcher in (a, b) for line in launcher.lines if line.startswith("returned")}
    assert returned == {"returned {0: 0}", "returned {1: 1}"}


FAILING = """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torchelastic import LaunchConfig, elastic_launch
    from torchelastic.multiprocessing.errors import record

    def fail(folder):
        open(os.path.join(folder, f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"), "x").close()
        if os.environ["RANK"] == "1":
            raise ValueError("the data are broken")
        time.sleep(600)

    @record
    def main():
        try:
            elastic_launch(LaunchConfig(1, 1, 3, max_restarts=2), fail)(sys.argv[1])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            message = failure.message["message"]
            print(f"rank {rank} first: {message}, exit code {failure.exitcode}, of {list(error.failures)}")
            raise

    if __name__ == "__main__":
        main()
"""


@pytest.mark.usefixtures("each_torch")
async def test_a_failed_run_raises_torchs_exception_with_the_root_cause_after_all_restarts(tmp_path: Path) -> None:
    folder, error_file = tmp_path / "ran", tmp_path / "error.json"
    folder.mkdir()
    output = await output_of(tmp_path, FAILING, folder, code=1, env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert re.search(r"rank 1 first: ValueError: the data are broken.*, exit code 1, of \[1\]", output)
    assert sorted(each.name for each in folder.iterdir()) == sorted(
        f"{rank}.{restart}" for rank in range(3) for restart in range(3)
    )
    assert "ValueError: the data are broken" in error_file.read_text()


async def test_objects_of_the_program_are_passed_to_workers_and_their_child_processes_and_back(tmp_path: Path) -> None:
    output = await output_of(
        tmp_path,
        """
            import enum, functools, multiprocessing, pickle
            from dataclasses import dataclass
            from torchelastic import LocalElasticAgent, WorkerSpec

            class Color(enum.Enum):
                RED = 1

            @dataclass
            class Point:
                x: int
                def all(self, color, data): return self, color, data * 2

            def decorated(function):
                return functools.wraps(function)(lambda *args: function(*args))

            @decorated
            def twice(point):
                return Point(2 * point.x)

            def work(point):
                for method in ("spawn", "forkserver"):
                    with multiprocessing.get_context(method).Pool(1) as pool:
                        point = pool.apply_async(twice, [point]).get(timeout=60)
                return pickle.loads(pickle.dumps(point))

            def returned(function, *args):
                spec = WorkerSpec(entrypoint=function, args=args)
                return LocalElasticAgent(spec).run().return_values[0]

            if __name__ == "__main__":
                far = 40
                print("closure", returned(lambda by: far + by, 2))
                point, color, data = returned(Point(1).all, Color.RED, b"x" * 50_000_000)
                print("objects", point == Point(1), color is Color.RED, len(data))
                print("processes", returned(work, Point(3)) == Point(12))
                print("exit", returned(sys.exit, 0))
            """,
    )
    said = [line for line in output.splitlines() if not line.startswith("[")]
    assert said == ["closure 42", "objects True True 100000000", "processes True", "exit None"]


async def test_a_program_that_launches_workers_on_import_gets_an_error(tmp_path: Path) -> None:
    output = await output_of(
        tmp_path,
        """
            import multiprocessing
            from torchelastic import LocalElasticAgent, WorkerSpec

            def work():
                process = multiprocessing.get_context("spawn").Process(target=print)
                process.start()
                process.join()
                return process.exitcode

            print(LocalElasticAgent(WorkerSpec(entrypoint=work)).run().return_values)
            """,
    )
    assert 'Put the code that launches workers below `if __name__ == "__main__":`' in output
    assert output.splitlines()[-1] == "{0: 1}"


async def test_a_command_runs_like_a_function(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "os.write(1, f'ran {sys.argv[1:]} {os.environ[\"RANK\"]}\\n'.encode())\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    output = await output_of(
        tmp_path,
        """
            from torchelastic import LaunchConfig, LocalElasticAgent, WorkerSpec, elastic_launch

            if __name__ == "__main__":
                config = LaunchConfig(1, 1, 2)
                print("returned", elastic_launch(config, "python")(sys.argv[1], 0))
                spec = WorkerSpec(entrypoint=sys.executable, args=(sys.argv[1], 7), max_restarts=0)
                failure = LocalElasticAgent(spec).run().failures[0]
                print("failed with", failure.exitcode)
            """,
        program,
    )
    assert "returned {0: None, 1: None}" in output
    assert "failed with 7" in output
    assert "ran ['0'] 1" in output.splitlines()


LIBRARY = """
    import asyncio, subprocess
    from torchelastic import LocalElasticAgent, WorkerSpec

    spec = WorkerSpec(local_world_size=2, entrypoint=meet_and_stay, args=(sys.argv[1],))
"""


async def test_an_agent_runs_in_any_thread_and_beside_a_running_event_loop(tmp_path: Path, stop: Path) -> None:
    stop.touch()
    output = await output_of(
        tmp_path,
        LIBRARY
        + """
    async def main():
        print("in a loop", LocalElasticAgent(spec).run().return_values)
        agents = [LocalElasticAgent(spec) for _ in range(2)]
        answers = await asyncio.gather(*(asyncio.to_thread(agent.run) for agent in agents), return_exceptions=True)
        print("in threads", *sorted(map(str, answers), reverse=True), sep=" | ")

    if __name__ == "__main__":
        asyncio.run(main())
""",
        stop,
    )
    assert "in a loop {0: 0, 1: 1}" in output
    assert "in threads | RunResult(state=<WorkerState.SUCCEEDED" in output
    assert "| Another agent runs in this process" in output


async def test_a_program_keeps_its_signals_and_children_and_workers_exit_with_it(tmp_path: Path, stop: Path) -> None:
    path = script(
        tmp_path,
        LIBRARY
        + """
    if __name__ == "__main__":
        mine = subprocess.Popen(["sleep", "600"])
        agent = LocalElasticAgent(spec)
        def leave(*_):
            print("asked", flush=True)
            agent.stop()
        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        result = agent.run()
        print("state", result.state.name, "mine", mine.poll(), signal.getsignal(signal.SIGTERM) is leave, flush=True)
        mine.kill()
        print("code", mine.wait())
        try:
            LocalElasticAgent(spec).run()
        except KeyboardInterrupt:
            print("interrupted", threading.active_count(), flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        LocalElasticAgent(spec).run()
""",
    )
    async with Launcher(path, stop) as launcher:
        worker = await launcher.wait_until_training(world=2)
        launcher.kill(signal.SIGTERM)
        await until_gone(worker)
        await launcher.wait_for_line("state STOPPED mine None True")
        await launcher.wait_for_line("code -9")
        since = len(launcher.lines)
        worker = await launcher.wait_until_training(world=2, since=since)
        launcher.kill(signal.SIGINT)
        await until_gone(worker)
        await launcher.wait_for_line(r"interrupted 1\b", since=since)
        interrupted = next(i for i, line in enumerate(launcher.lines) if "interrupted 1" in line)
        worker = await launcher.wait_until_training(world=2, since=interrupted)
        launcher.kill(signal.SIGTERM)
        await until_gone(worker)
        assert await launcher.code() == -signal.SIGTERM


ON_OTHER_HANDLERS = """
    from torchelastic import LaunchConfig, LocalElasticAgent, RendezvousHandler, WorkerSpec, elastic_launch

    class Own(RendezvousHandler):
        def next_rendezvous(self):
            from torch.distributed import HashStore
            return HashStore(), 0, 1

    class Broken(RendezvousHandler):
        def next_rendezvous(self):
            raise LookupError("nowhere to be found")

    class Odd(RendezvousHandler):
        def next_rendezvous(self):
            return "somewhere"

    class Spare(RendezvousHandler):
        def next_rendezvous(self):
            from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError
            raise RendezvousGracefulExitError("not needed")

    class Endless(RendezvousHandler):
        def next_rendezvous(self):
            time.sleep(600)

    def fail():
        raise ValueError("the data are broken")

    def stay(marker):
        open(marker, "x").close()
        time.sleep(600)

    def stopped(spec, marker):
        agent = LocalElasticAgent(spec)
        def stop():
            while not os.path.exists(marker):
                time.sleep(0.05)
            agent.stop()
        threading.Thread(target=stop).start()
        return agent.run().state.name

    def said(doing):
        try:
            doing()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")

    if __name__ == "__main__":
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        result = LocalElasticAgent(WorkerSpec(fn=fail, rdzv_handler=Own(), max_restarts=0)).run()
        print(ChildFailedError("fail", result.failures))
        marker = sys.argv[1]
        print("while workers run:", stopped(WorkerSpec(fn=stay, args=(marker,), rdzv_handler=Own()), marker))
        print("while it waits:", stopped(WorkerSpec(fn=print, rdzv_handler=Endless()), __file__))
        print(LocalElasticAgent(WorkerSpec(fn=print, rdzv_handler=Spare())).run())
        for spec in (
            WorkerSpec(fn=print, rdzv_handler=Broken()),
            WorkerSpec(fn=print, rdzv_handler=Odd()),
            WorkerSpec(fn=print, rdzv_handler=Own(), heartbeat_timeout=1),
            WorkerSpec(fn=print, args=(threading.Lock(),)),
        ):
            said(LocalElasticAgent(spec).run)
        config = LaunchConfig(2, 2, 1, run_id="x", rdzv_endpoint="127.0.0.1:1", rdzv_timeout=0.1)
        said(elastic_launch(config, print))
"""


async def test_failures_stops_and_unsupported_use_are_reported_in_one_sentence(tmp_path: Path) -> None:
    output = await output_of(tmp_path, ON_OTHER_HANDLERS, tmp_path / "marker")
    for wanted in (
        r"(?s)rank +: 0 \(local_rank: 0\).*ValueError: the data are broken",
        r"while workers run: STOPPED",
        r"while it waits: STOPPED",
        r"RunResult\(state=<WorkerState.STOPPED: 'STOPPED'>, return_values=\{\}, failures=\{\}\)",
        r"LookupError: nowhere to be found",
        r"RendezvousStateError: next_rendezvous\(\) must return .*'somewhere'",
        r"SettingsError: WorkerSpec.heartbeat_timeout and non_retryable_exit_codes need",
        r"SettingsError: The function print or its arguments cannot be passed to a worker: TypeError: .*lock",
        r"RendezvousConnectionError: .*127\.0\.0\.1:1",
    ):
        assert re.search(wanted, output), (wanted, output)


FAILS = """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torchelastic.launcher.api import LaunchConfig, elastic_launch
    from torchelastic.rendezvous import RendezvousHandler, rendezvous_handler_registry

    class Handler(RendezvousHandler):
        def next_rendezvous(self):
            raise error

        def shutdown(self):
            print("shut down after", type(error).__name__, flush=True)
            return True

    if __name__ == "__main__":
        rendezvous_handler_registry.register("mine", lambda parameters: Handler())
        for error in (SignalException("stopped", signal.SIGTERM), OSError("no network")):
            try:
                elastic_launch(LaunchConfig(1, 1, 1, rdzv_backend="mine"), "true")()
            except type(error) as raised:
                print("raised", type(raised).__name__, flush=True)
"""


async def test_a_rendezvous_handler_is_not_shut_down_after_a_signal(tmp_path: Path) -> None:
    output = await output_of(tmp_path, FAILS)
    lines = [line for line in output.splitlines() if line.startswith(("raised", "shut down"))]
    assert lines == ["raised SignalException", "shut down after OSError", "raised OSError"]


UNSUPPORTED = """
    from types import SimpleNamespace
    from torchelastic import LaunchConfig, LocalElasticAgent, WorkerSpec, elastic_launch

    def said(doing, *args):
        try:
            doing(*args)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")

    if __name__ == "__main__":
        numa = SimpleNamespace(should_fall_back_if_binding_fails=True)
        for config in (dict(event_log_handler="console"), dict(numa_options=numa), dict(signals_to_handle="SIGKILL")):
            said(elastic_launch(LaunchConfig(1, 1, 1, **config), "true"))
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        said(elastic_launch(LaunchConfig(1, 1, 2, virtual_local_rank=True), "true"))
        said(lambda: LocalElasticAgent(WorkerSpec(entrypoint="true"), uninterruptible_state_timeout=3))
"""


async def test_parameters_that_the_agent_does_not_support_are_rejected(tmp_path: Path) -> None:
    lines = [line for line in (await output_of(tmp_path, UNSUPPORTED)).splitlines() if "Error" in line]
    wanted = (
        "event_log_handler=console: must be one of null",
        "numa_options.should_fall_back_if_binding_fails is not supported: set it to False",
        "signals_to_handle=SIGKILL: must be signals",
        "CUDA_VISIBLE_DEVICES=0 has no GPU for local rank 1",
        "uninterruptible_state_timeout is not supported: use WorkerSpec.heartbeat_timeout",
    )
    for line, sentence in zip(lines, wanted, strict=True):
        assert line.startswith(f"SettingsError: {sentence}")
