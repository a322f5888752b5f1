"""Programs and launchers written for torch's launcher: they do the same with ours, or run unchanged."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import until_gone
from tests.support.launchers import Launcher, output_of, script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration


LOGS = """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    def work():
        rank = int(os.environ["RANK"])
        os.write(1, b"out %d\\n" % rank)
        os.write(2, b"err %d\\n" % rank)

    if __name__ == "__main__":
        folder, package, backend = sys.argv[1:]
        launcher = __import__(f"{package}.launcher.api", fromlist=["api"])
        tee = {0: Std.OUT, 1: Std.OUT, 2: Std.ALL}
        config = launcher.LaunchConfig(
            1, 1, 3, DefaultLogsSpecs(folder, redirects={0: Std.ERR}, tee=tee, local_ranks_filter={1, 2}),
            rdzv_backend=backend,
            rdzv_endpoint="localhost:0" if backend == "c10d" else "",
            log_line_prefix_template="<${rank}> ",
            duplicate_stdout_filters=["1", "2"],
        )
        launcher.elastic_launch(config, work)()
        print("waits", config.shutdown_timeout, "s")
"""


@pytest.mark.parametrize(
    ("package", "backend"), [("torch.distributed", "c10d"), ("torchelastic", "c10d"), ("torchelastic", "torchelastic")]
)
async def test_logs_specs_choose_the_files_and_the_console(package: str, backend: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    output = await output_of(tmp_path, LOGS, logs, package, backend)
    lines = sorted(line for line in output.splitlines() if re.search(r"(out|err) \d$", line))
    assert lines == ["<1> out 1", "<2> err 2", "<2> out 2", "err 1"]
    assert re.search(r"^waits 30(\.0)? s$", output, re.MULTILINE)
    files = {path.relative_to(*logs.glob("*/attempt_0")): path.read_text() for path in logs.rglob("*.log")}
    assert {os.fspath(path): "".join(sorted(text.splitlines(keepends=True))) for path, text in files.items()} == {
        "0/stdout.log": "out 0\n",
        "0/stderr.log": "err 0\n",
        "1/stdout.log": "out 1\n",
        "2/stdout.log": "out 2\n",
        "2/stderr.log": "err 2\n",
        "filtered_stdout.log": "<1> out 1\n<2> out 2\n",
    }


OF_EITHER_LAUNCHER = """
    import dataclasses, json
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from {package} import LaunchConfig, elastic_launch

    def fail(how):
        match how:
            case "raise":
                raise ValueError("the data are broken")
            case "exit":
                sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    def launch(function, *arguments, **config):
        config = {{"start_method": "spawn"}} | config
        if "{package}" != "torchelastic":
            config |= dict(rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
        elastic_launch(LaunchConfig(1, 1, run_id="run", max_restarts=0, **config), function)(*arguments)
"""

LAUNCHERS = ["torchelastic", "torch.distributed.launcher"]


async def test_failures_have_the_fields_of_torchs_launcher(tmp_path: Path) -> None:
    source = """
    if __name__ == "__main__":
        for how in ("raise", "exit", "kill"):
            try:
                launch(fail, how, nproc_per_node=1)
            except ChildFailedError as error:
                [(rank, failure)] = error.failures.items()
                fields = dataclasses.asdict(failure)
                assert type(failure).__module__.startswith("torch.") and fields.pop("pid") and fields.pop("timestamp")
                again = ChildFailedError(error.name, error.failures)
                print("is", rank, str(again) == str(error), error.name, failure.signal_name(), failure.exitcode)
                if os.path.exists(fields.pop("error_file")):
                    assert json.load(open(failure.error_file)) == fields["error_file_data"]
                print("has", sorted(fields), type(failure.message).__name__)
                if how == "raise":  # with torch's default of the start method
                    traceback = failure.message["extraInfo"].pop("py_callstack")
                    assert failure.message["extraInfo"].pop("timestamp")
                    print("said", failure.message, traceback.strip().splitlines()[-1])
"""
    ours, torchs = [
        [line for line in output.splitlines() if line.startswith(("is ", "has ", "said "))]
        for output in [
            await output_of(tmp_path, OF_EITHER_LAUNCHER.format(package=package) + source) for package in LAUNCHERS
        ]
    ]
    assert ours == torchs
    assert len(ours) == 7


RUNS = """
    import os, signal, subprocess, sys, threading

    def handle(number, frame):
        print("not lost", flush=True)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    children = [subprocess.Popen(["sh", "-c", "exit 7"]), subprocess.Popen(["cat"], stdin=subprocess.PIPE)]
    module = __import__(sys.argv[1], fromlist=["main"])
    module.main(["--standalone", "--no-python", "true"])
    thread = threading.Thread(target=module.main, args=(["--standalone", "--no-python", "true"],))
    thread.start()
    thread.join()
    try:
        module.main(["--standalone", "--no-python", "sh", "-c", "exit 3"])
    except Exception as error:
        print(type(error).__name__, error.get_first_failure()[1].exitcode, flush=True)
    children[1].communicate(b"")
    print("children", [child.wait() for child in children], flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        print("handler", signal.getsignal(number) is handle, flush=True)
"""


@pytest.mark.parametrize("module", ["torch.distributed.run", "torchelastic.run"])
async def test_a_program_that_calls_main_keeps_its_children_and_its_signal_handlers(
    module: str, tmp_path: Path
) -> None:
    lines = (await output_of(tmp_path, RUNS, module)).splitlines()
    assert "ChildFailedError 3" in lines
    assert not any("Exception in thread" in line for line in lines)
    assert "children [7, 0]" in lines
    kept = [line == "handler True" for line in lines if line.startswith("handler")]
    assert all(kept) or module != "torchelastic.run", kept


PROGRAM = """
    from {package}.agent.server.health_check_server import HealthCheckServer
    from {package}.agent.server import WorkerSpec
    from {package}.agent.server.local_elastic_agent import LocalElasticAgent
    from {package}.rendezvous import RendezvousParameters, RendezvousStoreInfo
    from {package}.rendezvous.registry import get_rendezvous_handler

    class Server(HealthCheckServer):
        def start(self):
            print("is started", flush=True)

        def stop(self):
            print("is stopped", flush=True)

    def described(agent):
        group = agent.get_worker_group()
        ranks = [(each.local_rank, each.global_rank, each.role_rank, each.world_size, each.role_world_size)
                 for each in group.workers]
        print("is", group.state.name, group.group_rank, group.group_world_size, ranks, flush=True)
        return group

    def work(marker):
        open(f"{{marker}}.{{os.getpid()}}", "x").close()
        return os.environ["LOCAL_RANK"]

    if __name__ == "__main__":
        from torch.distributed import HashStore
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        info = RendezvousStoreInfo.build(0, HashStore(), "10.0.0.7", server_port=7)
        print("is at", info.master_addr, info.master_port)
        backend, marker = sys.argv[1:]
        at = "127.0.0.1:0" if backend == "c10d" else ""
        handler = get_rendezvous_handler(RendezvousParameters(backend, at, "run", 1, 1))
        spec = WorkerSpec("trainer", 2, handler, entrypoint=work, args=(marker,), event_log_handler="null",
                          numa_options=None, virtual_local_rank=True)
        server = Server(lambda: 0, 0, 60)
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(), start_method="spawn", health_check_server=server)
        described(agent)
        result = agent.run()
        print("is", sorted(result.return_values.items()))
        described(agent)
"""


async def test_the_documented_program_runs_as_with_torch(tmp_path: Path) -> None:
    said = []
    for package, backend in (
        ("torch.distributed.elastic", "c10d"),
        ("torchelastic", "c10d"),
        ("torchelastic", "torchelastic"),
    ):
        output = await output_of(tmp_path, PROGRAM.format(package=package), backend, tmp_path / f"{package}.{backend}")
        said.append([line for line in output.splitlines() if line.startswith("is ")])
    assert said[0] == said[1] == said[2]
    assert "is stopped" in said[0]


SIGNALLED = """
    from torch.distributed.elastic.multiprocessing import SignalException
    from {package}.launcher import LaunchConfig, elastic_launch

    if __name__ == "__main__":
        backend = "c10d" if "{package}" == "torch.distributed" else "torchelastic"
        at = "127.0.0.1:0" if backend == "c10d" else ""
        config = LaunchConfig(1, 1, 1, run_id="run", rdzv_backend=backend, rdzv_endpoint=at,
                              signals_to_handle="SIGTERM,SIGUSR1")
        print("role", config.role, flush=True)
        for _ in range(2):
            try:
                elastic_launch(config, meet_and_stay)(sys.argv[1])
            except SignalException as error:
                print("raised for", error.sigval.name, flush=True)
            finally:
                print("finally", flush=True)
        sys.exit(7)
"""


@pytest.mark.parametrize("package", ["torch.distributed", "torchelastic"])
async def test_a_signal_without_a_handler_raises_torchs_exception(package: str, tmp_path: Path, stop: Path) -> None:
    source = SIGNALLED.format(package=package).replace("meet_and_stay)", "stay_alone)")
    source = source.replace("    if __name__", STAY_ALONE + "    if __name__", 1)
    async with Launcher(script(tmp_path, source), stop) as launcher:
        since = 0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            worker = int((await launcher.wait_for_line(r"worker (\d+)", since=since))[1])
            since = len(launcher.lines)
            launcher.kill(number)
            await until_gone(worker)
        assert await launcher.code() == 7
    assert "role default_role" in launcher.lines
    ends = [line for line in launcher.lines if line.startswith(("raised", "finally"))]
    assert ends == ["raised for SIGTERM", "finally", "raised for SIGUSR1", "finally"]


STAY_ALONE = """
    def stay_alone(stop):
        print("worker", os.getpid(), flush=True)
        while not os.path.exists(stop):
            time.sleep(0.01)

"""


ACCELERATED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print(f"trained {accelerator.process_index} of {accelerator.num_processes}\\n", end="", flush=True)
accelerator.end_training()
"""

ACCELERATE = """
    import torch.distributed
    import torchelastic.run

    if __name__ == "__main__":
        sys.modules["torch.distributed.run"] = torch.distributed.run = torchelastic.run
        from accelerate.commands.launch import launch_command, launch_command_parser
        launch_command(launch_command_parser().parse_args(sys.argv[1:]))
"""


async def test_accelerate_trains_with_the_agent_in_place_of_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(ACCELERATED)
    flags = "--multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no --dynamo_backend=no"
    output = await output_of(tmp_path, ACCELERATE, *flags.split(), "--main_process_port=0", program)
    assert {"trained 0 of 2", "trained 1 of 2"} <= {*output.splitlines()}
    assert "started ranks 0, 1 of a world of 2" in output


OF_ARGUMENTS = """
    import json
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    import {package}.run as run
    from {package}.launcher.api import elastic_launch

    if __name__ == "__main__":
        args = run.parse_args([
            "--standalone", "--nproc_per_node=2", "--max-restarts", "3", "--role=trainer", "--node_rank=0",
            "--local-ranks-filter=0,1", "--duplicate-stdout-filters=a,b", "--signals-to-handle=SIGTERM",
            "--virtual-local-rank", "-m", "json.tool", "--help",
        ])
        print("is", args.nnodes, args.nproc_per_node, args.max_restarts, args.role, args.training_script_args)
        config, command, rest = run.config_from_args(args)
        print("is", config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts, config.role)
        print("is", type(config.logs_specs).__name__, config.signals_to_handle, config.virtual_local_rank)
        print("is", [*config.duplicate_stdout_filters], command == sys.executable, [*rest][-3:])
        print("is", run.parse_min_max_nnodes("2:4"), run.parse_min_max_nnodes("3"), run.determine_local_world_size("5"))
        run.run(args)
        print("is done", flush=True)
"""


async def test_programs_can_use_torchruns_functions(tmp_path: Path) -> None:
    ours, torchs = [
        [line for line in output.splitlines() if line.startswith(("is ", "usage: "))]
        for output in [
            await output_of(tmp_path, OF_ARGUMENTS.format(package=package))
            for package in ("torchelastic", "torch.distributed")
        ]
    ]
    assert ours == torchs
    assert len(ours) == 8
