"""A function is launched on workers of this machine and of hosts that SSH reaches; its values and exceptions return."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
from jupyter_client.manager import start_new_async_kernel

from tests.support.agents import until_gone
from tests.support.slurm import slurm
from tests.support.ssh_server import ssh_server
from tests.support.workers import poll_until
from torchelastic.agent.workers.process_tree import read_table, with_descendants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

START = """
import json, logging, os, signal, sys, time
import torchelastic.launcher as trx

def rank():
    return int(os.environ["RANK"])

def outcome(func, *args, **settings):
    # The value of each rank, or what was raised.
    try:
        return trx.launch(func, args, workers_per_host=settings.pop("workers_per_host", 2), **settings).by_ranks()
    except Exception as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
"""


class Script:
    """A program of a user in a folder of its own."""

    def __init__(self, folder: Path, source: str, **environment: str) -> None:
        (folder / "main.py").write_text(START + dedent(source))
        self.folder = folder
        self.environment = {**os.environ, **environment}

    def start(
        self, *arguments: str, through: tuple[str, ...] = (), stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*through, sys.executable, "main.py", *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )

    def output(self, *arguments: str) -> str:
        """Run the program, which succeeds; return its standard output."""
        with self.start(*arguments) as process:
            output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        return output

    def tool(self, *command: str) -> str:
        """Run another command, which succeeds, in the same folder; return its standard output."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    def answer(self) -> Any:
        """Run the program, and return the JSON object in its last line."""
        return json.loads(self.output().splitlines()[-1])


@pytest.fixture(scope="module")
def ssh_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ssh_server(tmp_path_factory.mktemp("ssh"), "node1", "node2") as programs:
        yield f"{programs}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def slurm_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with slurm(tmp_path_factory.mktemp("slurm"), "node1", "node2") as programs:
        yield f"{programs}:{os.environ['PATH']}"


def test_values_of_all_kinds_return_and_nothing_of_the_launch_remains(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        from dataclasses import dataclass
        import numpy
        import torch

        @dataclass
        class Point:
            x: int

            def shifted(self, by):
                return Point(self.x + by + rank())

        def reduced(tensor):
            torch.distributed.all_reduce(tensor)
            return tensor.item()

        def tensors():
            base = torch.arange(12_000_000.0).reshape(3, -1)
            tied = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            tied[1].weight = tied[0].weight
            types = [torch.ones(2, dtype=each) for each in (torch.bfloat16, torch.uint16, torch.bool, torch.cfloat)]
            others = [torch.empty(0), torch.eye(2).to_sparse(), torch.empty(2, device="meta")]
            return {
                "base": base, "row": base[1], "columns": base.t(), "tied": tied, "types": types, "others": others,
                "gradient": torch.ones(2, requires_grad=True), "array": numpy.arange(3), "bytes": bytearray(b"abc"),
            }

        def checked(got):
            got["base"][1, 0], got["array"][0], got["bytes"][0] = -1, 7, 65
            return [
                got["row"][0].item(),
                got["columns"][0, 1].item(),
                got["columns"].is_contiguous(),
                got["base"].sum().item() > 0,
                got["tied"][0].weight is got["tied"][1].weight and got["tied"][0].weight.requires_grad,
                [f"{each.dtype}" for each in got["types"] if each[1] == 1],
                [each.numel() for each in got["others"]],
                got["gradient"].requires_grad,
                got["array"].tolist(),
                got["bytes"].decode(),
            ]

        def large(size):
            value = bytearray(size)
            value[-1] = 1
            return value

        def without_memory():
            from torchelastic.agent import function_call
            function_call.available_memory = lambda: 0
            return large(50_000_000)

        def children():
            own = f"PPid:\\t{os.getpid()}\\n"
            return [name for name in os.listdir("/proc") if name.isdigit() and own in status(name)]

        def status(name):
            with open(f"/proc/{name}/status") as file:
                return file.read()

        if __name__ == "__main__":
            import torch.distributed as dist
            dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/own", rank=0, world_size=1)
            offset, answer = 40, {"cold": outcome(rank, keep_warm=False), "children": children()}
            # Launches with the same settings follow each other, because only they share a warm process.
            answer["closure"] = outcome(lambda: offset + rank())
            answer["method"] = outcome(Point(1).shifted, 2) == [Point(3), Point(4)]
            answer["collective"] = outcome(reduced, torch.ones(1))
            answer["no group"] = outcome(dist.is_initialized, backend=None)
            answer["large"] = [(len(each), each[-1]) for each in outcome(large, 50_000_000)]
            answer["no memory"] = [(len(each), each[-1]) for each in outcome(without_memory)]
            answer["empty"] = outcome(bytes) == [b"", b""]
            answer["exit"] = outcome(lambda: rank() or sys.exit(0))
            first = outcome(os.getppid, workers_per_host=1)
            answer["warm"] = outcome(os.getppid, workers_per_host=1) == first
            answer["keywords"] = trx.Launcher(workers_per_host=1).run(lambda a, b: a - b, 5, b=3).rank(0)
            answer["older form"] = trx.Launcher(workers_per_host=1).run(max, func_args=(5, 7)).index("localhost", 0)
            answer["tensors"] = checked(outcome(tensors, workers_per_host=1)[0])
            answer["environment"] = outcome(lambda: os.environ["MINE"], extra_env_vars={"MINE": "é'"})
            for value in "12":
                open("values.sh", "w").write(f"VALUE={value}")
                answer["file " + value] = outcome(lambda: os.environ["VALUE"], workers_per_host=1, env_file="values.sh")
            answer["idle"] = len(children())
            print(json.dumps(answer))
        """,
    )
    assert script.answer() == {
        "closure": [40, 41],
        "method": True,
        "collective": [2.0, 2.0],
        "no group": [False, False],
        "keywords": 2,
        "older form": 7,
        "large": [[50_000_000, 1]] * 2,
        "no memory": [[50_000_000, 1]] * 2,
        "empty": True,
        "tensors": [
            *(-1.0, -1.0, False, True, True),
            ["torch.bfloat16", "torch.uint16", "torch.bool", "torch.complex64"],
            *([0, 4, 2], True, [7, 1, 2], "Abc"),
        ],
        "environment": ["é'"] * 2,
        "exit": [None, 1],
        "warm": True,
        "file 1": ["1"],
        "file 2": ["2"],
        "cold": [0, 1],
        "children": [],
        "idle": 1,
    }


def test_the_root_cause_of_a_failure_is_raised_with_its_rank_and_traceback(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        import torch
        from torch.distributed import all_reduce

        class MyError(Exception):
            pass

        class Unreadable:
            def __reduce__(self):
                return int, ("no number",)

        class Stubborn(Exception):
            def __init__(self, one, two):
                super().__init__("cannot be made of one argument")

        def fail(how, others):
            if rank() == 1:
                how()
            others()

        def raising(error):
            raise error

        def sleep():
            time.sleep(600)

        def reduce():
            all_reduce(torch.ones(1))

        def once(path):
            if rank() == 1 and not os.path.exists(path):
                open(path, "w").close()
                os._exit(3)
            return os.environ["TORCHELASTIC_RESTART_COUNT"]

        if __name__ == "__main__":
            answer = {
                "asleep": outcome(fail, lambda: raising(MyError("bad data")), sleep),
                "collective": outcome(fail, lambda: raising(MyError("bad data")), reduce),
                "after it": outcome(fail, lambda: sys.exit(4), sleep),
                "no pickle": outcome(lambda: [bytes(100_000), (each for each in ())]),
                "unreadable": outcome(Unreadable),
                "stubborn": outcome(fail, lambda: raising(Stubborn(1, 2)), sleep),
                "signal": outcome(fail, lambda: os.kill(os.getpid(), signal.SIGKILL), sleep),
                "exit": outcome(fail, lambda: sys.exit(3), sleep),
                "restarted": outcome(once, os.path.abspath("once"), max_restarts=1),
                "hung": outcome(fail, lambda: os.kill(os.getpid(), signal.SIGSTOP), sleep, heartbeat_timeout=1.0),
            }
            print(json.dumps(answer))
        """,
    )
    answer = script.answer()
    for case in ("asleep", "collective"):
        kind, text, note = answer[case]
        assert (kind, text) == ("MyError", "bad data")
        assert note.startswith("Raised by rank 1 on localhost:\nTraceback (most recent call last):")
        assert "in raising" in note
    assert answer["after it"][0] == "WorkerFailedError"
    assert "exit code 4" in answer["after it"][1]
    assert answer["no pickle"][1].startswith("The result of the function cannot be passed to the caller: TypeError:")
    assert "cannot be unpickled: ValueError: invalid literal" in answer["unreadable"][1]
    kind, _, note = answer["stubborn"]
    assert kind == "WorkerFailedError"
    assert "cannot be made of one argument" in note
    assert answer["signal"][0] == answer["exit"][0] == "WorkerFailedError"
    assert len(answer["signal"]) == len(answer["exit"]) == 2  # no note of an earlier exception
    assert "rank 1" in answer["signal"][1]
    assert "SIGKILL" in answer["signal"][1]
    assert "exit code 3" in answer["exit"][1]
    assert answer["restarted"] == ["1", "1"]
    assert answer["hung"][0] == "WorkerFailedError"
    assert "heartbeat" in answer["hung"][1]


def test_every_line_of_the_workers_reaches_files_and_handlers(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        def talk(count=50):
            for number in range(count):
                print("line", number)
            os.write(1, b"raw\\n")
            os.system("echo from a child; echo to stderr >&2")
            logging.getLogger("mine").warning("of a logger")
            logging.getLogger("mine").info("two\\nlines")
            os.write(1, b"no line break")

        class Seen(logging.Handler):
            def emit(self, record):
                seen.append([record.local_rank, record.levelname, record.name, record.getMessage()])

        if __name__ == "__main__":
            seen = []
            outcome(talk)
            trx.launch(talk, (50_000,), workers_per_host=2, log_handlers=(each for each in [Seen()]))
            trx.add_filter_to_handler(only := Seen(), "localhost", 0, logging.ERROR)
            every, seen = seen, []
            launcher = trx.Launcher(workers_per_host=2).set_logging_handlers(
                lambda: [only, trx.file_handler("localhost", 1, "of_1.log")]
            )
            launcher.run(talk)
            trx.Launcher(workers_per_host=2, extra_env_vars=None).set_logging_handlers(None).run(talk)
            print(json.dumps({"every": every, "only": seen}))
        """,
        TORCHRUNX_LOG_DIR=str(tmp_path / "logs"),
    )
    lines = script.output().splitlines()
    answer = json.loads(lines[-1])
    expected, most = ([*(f"line {number}" for number in range(count)), "raw", "from a child"] for count in (50, 50_000))
    ends = ["no line break"]
    for rank in (0, 1):
        own = [tuple(each[1:]) for each in answer["every"] if each[0] == rank]
        assert [text for level, name, text in own if level == "INFO" and name != "mine"] == most + ends
        assert ("ERROR", "torchelastic.launcher", "to stderr") in own
        assert ("WARNING", "mine", "WARNING:mine:of a logger") in own
        assert ("INFO", "mine", "INFO:mine:two\nlines") in own
        [file] = (tmp_path / "logs").glob(f"*-localhost-{rank}.log")
        assert {*expected, *ends, "to stderr"} <= {*file.read_text().splitlines()}
    assert [each[3] for each in answer["only"]] == ["to stderr"]
    assert {*expected, *ends} <= {*(tmp_path / "of_1.log").read_text().splitlines()}
    shown = [line.removeprefix("[localhost worker 0] ") for line in lines[:-1] if "worker 0]" in line]
    assert [line for line in shown if line in {*expected, *ends}] == expected + ends


@pytest.mark.ssh
@pytest.mark.parametrize(
    ("number", "hosts"),
    [(signal.SIGKILL, ["localhost"]), (signal.SIGINT, ["localhost"]), (signal.SIGKILL, ["node1", "node2"])],
)
async def test_all_processes_end_with_the_launcher(
    number: signal.Signals, hosts: list[str], tmp_path: Path, ssh_path: str
) -> None:
    script = Script(
        tmp_path,
        """
        def wait():
            with open(f"{rank()}.part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"{rank()}.part", str(rank()))
            time.sleep(600)

        if __name__ == "__main__":
            trx.launch(rank, workers_per_host=1)
            if not (child := os.fork()):  # keeps no process of the launch alive
                signal.pause()
            open("child", "w").write(str(child))
            trx.launch(wait, hostnames=sys.argv[1:], workers_per_host=2)
        """,
        PATH=ssh_path,
    )
    ranks = [tmp_path / str(rank) for rank in range(2 * len(hosts))]
    with script.start(*hosts) as process:
        await poll_until(lambda: all(path.exists() for path in ranks))
        workers = {int(path.read_text()) for path in ranks}
        child = int((tmp_path / "child").read_text())
        family = with_descendants(read_table(), [process.pid]) - {child}
        assert workers <= family or "node1" in hosts
        process.send_signal(number)
        try:
            await asyncio.to_thread(process.wait)
            await asyncio.gather(*map(until_gone, {*family, *workers}))
        finally:
            os.kill(child, signal.SIGKILL)  # it has the pipes of the program's output
            process.communicate()


def test_the_command_line_has_the_options_of_the_guide(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        """
        import tyro

        if __name__ == "__main__":
            print(json.dumps(tyro.cli(trx.Launcher).run(rank).by_ranks()))
        """,
        COLUMNS="200",
    )
    text = script.output("--help")
    names = ["hostnames", "workers-per-host", "ssh-config-file", "backend", "timeout", "default-env-vars"]
    places = [text.index(f"--{name} ") for name in (*names, "extra-env-vars", "env-file", "workers")]
    assert places == sorted(places)
    assert re.search(r"--hostnames \{\[STR \[STR \.\.\.\]\]\}\|\{auto,slurm,kubernetes\}", text)
    assert re.search(r"--backend \{None,nccl,gloo,mpi,ucc,auto\}", text)
    assert len(re.findall(r"--(?:ssh-config|env)-file (?:\{None\}\|)?STR\|PATH(?:\|\{None\})?", text)) == 2
    assert script.output("--workers-per-host", "2", "--backend", "None").splitlines()[-1] == "[0, 1]"
    with script.start("--hostnames", "slurm") as process:
        assert "There is no SLURM allocation" in process.communicate()[1]


@pytest.mark.ssh
def test_hosts_that_share_nothing_train_together_over_ssh(tmp_path: Path, ssh_path: str) -> None:
    (tmp_path / "mine.py").write_text("def secret():\n    return 'from my module'\n")
    (tmp_path / "variables.sh").write_text("FROM_FILE=yes\nif [[ a == a ]]; then export ALSO=1; fi\n")
    (tmp_path / "elsewhere").mkdir()
    script = Script(
        tmp_path,
        """
        import torch
        from torch.distributed import all_reduce

        def train(weight):
            os.chdir("/")
            import mine
            all_reduce(total := torch.full((1,), float(rank())))
            common = [os.environ.get(name) for name in ("FROM_FILE", "ALSO", "CHOSEN_ONE", "NOT_CHOSEN")]
            return [weight.item() + total.item(), mine.secret(), *common, rank()]

        def fail():
            if rank() == 2:
                raise KeyError("of rank 2")
            time.sleep(600)

        if __name__ == "__main__":
            settings = {"hostnames": ["node1", "node2"], "workers_per_host": [1, 2]}
            sent = {"env_file": os.path.abspath("variables.sh"), "code": ".", "extra_env_vars": ["CHOSEN*"]}
            result = trx.launch(train, (torch.ones(1),), **settings, **sent)
            print(json.dumps([result.by_hostnames(), outcome(fail, **settings)]))
        """,
        PATH=ssh_path,
        CHOSEN_ONE="chosen",
        NOT_CHOSEN="kept",
    )
    values, failure = script.answer()
    common = [4.0, "from my module", "yes", "1", "chosen", None]
    assert values == {"node1": [[*common, 0]], "node2": [[*common, 1], [*common, 2]]}
    assert failure[:2] == ["KeyError", "'of rank 2'"]
    assert failure[2].startswith("Raised by rank 2 on node2:")


@pytest.mark.ssh
def test_a_model_is_trained_on_two_hosts_and_then_tested_on_this_machine(tmp_path: Path, ssh_path: str) -> None:
    script = Script(
        tmp_path,
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel

        def train(model, steps):
            parallel = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            for _ in range(steps):
                optimizer.zero_grad()
                inputs = torch.randn(32, 1)
                (parallel(inputs) - 3 * inputs).square().mean().backward()
                optimizer.step()
            return model

        def test(model):
            return abs(model(torch.ones(1)).item() - 3)

        if __name__ == "__main__":
            bound = []
            sys.addaudithook(lambda event, details: event == "socket.bind" and bound.append(str(details[1])))
            model = torch.nn.Linear(1, 1)
            hosts = {"hostnames": ["node1", "node2"], "workers_per_host": 2}
            trained = trx.launch(func=train, func_args=(model,), func_kwargs={"steps": 100}, **hosts).rank(0)
            error = trx.launch(func=test, func_args=(trained,), hostnames=["localhost"], workers_per_host=1).rank(0)
            print(json.dumps([error, bound]))
        """,
        PATH=ssh_path,
    )
    error, bound = script.answer()
    assert error < 0.1
    assert bound == []  # nobody can connect to the launcher


@pytest.mark.ssh
def test_a_line_on_the_terminal_counts_the_hosts_until_all_are_connected(tmp_path: Path, ssh_path: str) -> None:
    script = Script(
        tmp_path,
        """
        if __name__ == "__main__":
            trx.launch(rank, hostnames=["node1", "node2"], workers_per_host=1, backend=None)
        """,
        PATH=ssh_path,
    )
    reader, terminal = os.openpty()
    with script.start(stderr=terminal) as process:
        os.close(terminal)
        assert process.wait(timeout=200) == 0
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    lines = re.findall(r"(\d) of 2 hosts are connected", shown)
    assert lines[0] == "0"
    assert lines[-1] == "2"
    assert shown.endswith("\r\x1b[K")


@pytest.mark.ssh
def test_a_host_that_cannot_take_part_is_named_in_one_sentence(tmp_path: Path, ssh_path: str) -> None:
    (tmp_path / "broken.sh").write_text("exit 3\n")
    (tmp_path / "chatty").write_text("#!/bin/sh\necho Welcome to this host\nexec sleep 600\n")
    (tmp_path / "chatty").chmod(0o755)
    script = Script(
        tmp_path,
        """
        def is_left(name):  # nodes and workers run in this folder
            try:
                return int(name) != os.getpid() and os.readlink(f"/proc/{name}/cwd") == os.getcwd()
            except (OSError, ValueError):
                return False

        if __name__ == "__main__":
            two = {"hostnames": ["node1", "node2"]}
            answer = [
                outcome(rank, hostnames=["node1", "nowhere.invalid"]),
                outcome(rank, **two, python="/nothing/python"),
                outcome(rank, **two, env_file=os.path.abspath("broken.sh")),
                outcome(rank, **two, python=os.path.abspath("chatty")),
            ]
            print(json.dumps([*answer, [*filter(is_left, os.listdir("/proc"))]]))
        """,
        PATH=ssh_path,
    )
    unresolved, python, broken, chatty, left = script.answer()
    assert left == []
    assert "its shell prints text before the agent starts" in chatty[1]
    assert unresolved[0] == python[0] == "AgentFailedError"
    assert unresolved[1].startswith("The agent on nowhere.invalid has ended: ssh: Could not resolve hostname")
    assert "/nothing/python" in python[1]
    assert broken[0] == "SettingsError"
    assert "broken.sh fails" in broken[1]


@pytest.mark.ssh
def test_a_launch_continues_without_a_host_that_is_lost(tmp_path: Path, ssh_path: str) -> None:
    script = Script(
        tmp_path,
        """
        def train():
            if os.environ["WORLD_SIZE"] == "2" and rank() == 1:
                os.kill(int(open(f"/proc/{os.getppid()}/stat").read().split()[3]), signal.SIGKILL)
            if os.environ["WORLD_SIZE"] == "2":
                time.sleep(600)
            return "trained by " + os.environ["WORLD_SIZE"]

        if __name__ == "__main__":
            print(json.dumps(outcome(train, hostnames=["node1", "node2"], workers_per_host=1, workers=(1, 2))))
        """,
        PATH=ssh_path,
    )
    assert script.answer() == ["trained by 1"]


@pytest.mark.slurm
async def test_an_allocation_of_slurm_is_taken_without_ssh(tmp_path: Path, slurm_path: str) -> None:
    script = Script(
        tmp_path,
        """
        import torch, tyro
        from torch.distributed import all_reduce

        def train(data):
            all_reduce(total := torch.ones(1))
            return [rank(), total.item(), os.environ["SLURMD_NODENAME"], data]

        def fail():
            if rank() == 3:
                raise KeyError("of rank 3")
            time.sleep(600)

        if __name__ == "__main__":
            data = bytes(range(256)) * 10_000
            values = trx.launch(train, (data,), hostnames="auto").by_hostnames()
            values = {host: [[*rest, copy == data] for *rest, copy in own] for host, own in values.items()}
            try:
                tyro.cli(trx.Launcher, args=["--hostnames", "slurm"]).run(fail)
            except KeyError as error:
                failure = [*error.args, *error.__notes__]
            with open("part", "w") as file:
                json.dump([values, failure], file)
            os.rename("part", "answer")
        """,
        PATH=slurm_path,
    )
    options = ("--nodes=2", "--ntasks-per-node=2", "--output=output")
    script.tool("sbatch", *options, f"--wrap={sys.executable} main.py")
    await poll_until((tmp_path / "answer").exists)
    values, failure = json.loads((tmp_path / "answer").read_text())
    assert values == {
        node: [[rank, 4.0, node, True] for rank in ranks] for node, ranks in {"node1": [0, 1], "node2": [2, 3]}.items()
    }
    assert failure[0] == "of rank 3"
    assert failure[1].startswith("Raised by rank 3 on node2:")


@pytest.mark.slurm
@pytest.mark.parametrize("how", ["the launcher is killed", "a step is cancelled"])
async def test_all_steps_end_with_the_launcher_or_with_one_of_them(how: str, tmp_path: Path, slurm_path: str) -> None:
    script = Script(
        tmp_path,
        """
        def wait():
            with open(f"{rank()}.part", "w") as file:
                file.write(f"{os.getppid()} {os.getpid()}")
            os.rename(f"{rank()}.part", str(rank()))
            time.sleep(600)

        if __name__ == "__main__":
            open("launcher", "w").write(str(os.getpid()))
            print(json.dumps(outcome(wait, workers_per_host=1)))
        """,
        PATH=slurm_path,
    )
    ranks = [tmp_path / "0", tmp_path / "1"]
    with script.start(through=("salloc", "--nodes=2", "--exclusive")) as process:
        await poll_until(lambda: all(path.exists() for path in ranks))
        remaining = {int(pid) for path in ranks for pid in path.read_text().split()}
        if how == "a step is cancelled":
            lines = script.tool("squeue", "--steps", "--noheader", "--format=%i %N").splitlines()
            [step] = [name for name, node in map(str.split, lines) if node == "node2"]
            script.tool("scancel", step)
        else:
            os.kill(int((tmp_path / "launcher").read_text()), signal.SIGKILL)
        await asyncio.gather(*map(until_gone, remaining))
        output, _ = await asyncio.to_thread(process.communicate)
    if how == "a step is cancelled":
        kind, text = json.loads(output.splitlines()[-1])
        assert kind == "AgentFailedError"
        assert re.match(r"The agent on node2 has ended: .*STEP .* CANCELLED AT ", text)


async def test_functions_of_a_notebook_run_and_end_under_their_cell(tmp_path: Path) -> None:
    manager, client = await start_new_async_kernel(kernel_name="python3", cwd=f"{tmp_path}")
    kernel = manager.provisioner.pid

    async def run(source: str, until: str = "") -> dict[str, str]:
        # The output of a cell by its kind; the cell is interrupted after a text.
        output: dict[str, str] = {}

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            text = content.get("text") or content.get("ename") or content.get("data", {}).get("text/plain", "")
            output[message["msg_type"]] = output.get(message["msg_type"], "") + text
            if until and until in text:
                os.kill(kernel, signal.SIGINT)  # as a notebook does

        await client.execute_interactive(dedent(source), output_hook=take, timeout=120)
        return output

    try:
        await run(
            """
            import os, time, torchelastic.launcher as trx

            class CellError(Exception):
                pass

            def work(offset):
                print("in a cell")
                if not offset:
                    raise CellError
                if offset < 0:
                    print("asleep")
                    time.sleep(600)
                return offset + int(os.environ["RANK"])

            def launched(offset):
                return trx.launch(work, (offset,), workers_per_host=2).by_ranks()
            """
        )
        answer = await run("launched(40)")
        assert answer["stream"] == "[localhost worker 0] in a cell\n"
        assert answer["execute_result"] == "[40, 41]"
        assert (await run("launched(0)"))["error"] == "CellError"
        before = with_descendants(read_table(), [kernel])
        assert (await run("launched(-1)", until="asleep"))["error"] == "KeyboardInterrupt"
        assert with_descendants(read_table(), [kernel]) <= before
        assert (await run("launched(1)"))["execute_result"] == "[1, 2]"
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
