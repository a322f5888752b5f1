"""`elasticjob run` with real processes: etcd, agents, workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from elastic_operator.client.local import LocalJobs
from elastic_operator.errors import BadInput, NotFound
from tests.support.crew import told
from tests.support.local_runs import LocalRun, gone, manifest, processes_of, reasons, training
from torchelastic.protocol import KEY_ROOT
from torchelastic.store import connect as connect_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.etcd import EtcdServer

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[Path]:
    """A home folder for one test; after the test, no process of it may be left."""
    home = tmp_path / "home"
    yield home
    assert await gone(processes_of(home), within=5), processes_of(home)


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
    assert not Path(record["run"]["socket"]).exists()
    assert not (Path(record["run"]["directory"]) / "etcd").exists()
    assert sorted(rank for pod in record["pods"] for rank in pod["ranks"]) == [0, 1, 2, 3]
    for rank in range(4):
        assert f"rank={rank}, world_size = 4" in output_of(record, rank)
    assert record["progress"]["line"].endswith("rank=0, world_size = 4")
    (known,) = LocalJobs(home=home).snapshots()
    assert not known["run"]["alive"]


async def test_scaling_changes_the_size_of_the_running_job(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path)) as run:
        small = await run.trains(2)
        jobs = LocalJobs(home=home)
        await asyncio.to_thread(jobs.scale, "job", 3)
        large = await run.trains(3)
        staying = {pod["uid"] for pod in training(small)}
        assert staying < {pod["uid"] for pod in training(large)}
        await asyncio.to_thread(jobs.scale, "job", 1)
        await run.trains(1)
        alone = await run.until(lambda snapshot: len(snapshot["pods"]) == 1)
        assert alone["pods"][0]["uid"] in staying
        with pytest.raises(BadInput, match=r"spec.*4.*maxReplicas|maxReplicas.*4|replicas"):
            await asyncio.to_thread(jobs.scale, "job", 4)
        assert (await asyncio.to_thread(jobs.describe, "job"))["manifest"]["spec"]["replicas"] == 1
        (tmp_path / "finish").touch()
        assert await run.exit_code() == 0, run.output


async def test_a_killed_agent_is_replaced_and_the_events_name_it(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path)) as run:
        before = await run.trains(2)
        victim = training(before)[0]
        os.kill(victim["pid"], signal.SIGKILL)
        after = await run.until(
            lambda snapshot: (
                len(training(snapshot)) == 2 and victim["uid"] not in {pod["uid"] for pod in training(snapshot)}
            )
        )
        (died,) = (event for event in after["events"] if event["reason"] == "PodDied")
        assert victim["name"] in died["message"]
        assert "SIGKILL" in died["message"]
        assert died["warning"]
        (ended,) = (pod for pod in after["pods"] if pod["uid"] == victim["uid"])
        assert ended["exitCode"] == 128 + signal.SIGKILL
        (tmp_path / "finish").touch()
        assert await run.exit_code() == 0, run.output


async def test_training_continues_when_etcd_is_killed(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path)) as run:
        before = await run.trains(2)
        os.kill(before["etcd"]["pid"], signal.SIGKILL)
        back = await run.until(
            lambda snapshot: (
                snapshot["etcd"]["pid"] not in (None, before["etcd"]["pid"]) and "EtcdRestarted" in reasons(snapshot)
            )
        )
        assert back["etcd"]["endpoint"] == before["etcd"]["endpoint"]
        assert back["etcd"]["restarts"] == 1
        await asyncio.to_thread(LocalJobs(home=home).scale, "job", 3)
        after = await run.trains(3)
        assert after["status"]["round"] == before["status"]["round"] + 1
        assert after["status"]["restarts"] == 0
        assert {pod["uid"] for pod in training(before)} < {pod["uid"] for pod in training(after)}
        (tmp_path / "finish").touch()
        assert await run.exit_code() == 0, run.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_an_interrupted_run_leaves_no_process_and_says_so(
    home: Path, tmp_path: Path, number: signal.Signals
) -> None:
    async with LocalRun(home, manifest(tmp_path)) as run:
        await run.trains(2)
        run.process.send_signal(number)
        assert await run.exit_code() == 130, run.output
        assert processes_of(home) == {}
        assert run.record["run"]["ended"]["how"] == "interrupted"
        assert all(pod["ended"] is not None for pod in run.record["pods"])
    assert not LocalJobs(home=home).describe("job")["run"]["alive"]
    with pytest.raises(NotFound, match="no job job is running here"):
        LocalJobs(home=home).scale("job", 1)


async def test_pods_that_ignore_their_end_are_killed_within_seconds(home: Path, tmp_path: Path) -> None:
    stubborn = ["sh", "-c", "trap '' TERM INT; while :; do sleep 0.05; done"]
    async with LocalRun(home, manifest(tmp_path, command=stubborn)) as run:
        await run.trains(2)
        run.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(10):
            assert await run.exit_code() == 130, run.output
        assert processes_of(home) == {}


SAVES = """
import os, time
from pathlib import Path
import torchelastic as worker

rank = os.environ["RANK"]
worker.ask_for_notice(20)
time.sleep(1)  # it goes to the agent, the store, and elasticjob
Path(f"asked.{rank}").touch()
while worker.notice() is None:
    time.sleep(0.01)
time.sleep(4)  # longer than pods have that do not ask
Path(f"saved.{rank}").touch()
worker.saved()
time.sleep(600)
"""


async def test_an_interrupted_run_waits_for_workers_that_save(home: Path, tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    async with LocalRun(home, manifest(tmp_path, command=[sys.executable, "saves.py"])) as run:
        await run.trains(2)
        for rank in range(2):
            await told(tmp_path / f"asked.{rank}")
        run.process.send_signal(signal.SIGINT)
        assert await run.exit_code() == 130, run.output
        assert processes_of(home) == {}
    assert {path.name for path in tmp_path.glob("saved.*")} == {"saved.0", "saved.1"}


async def test_a_second_request_does_not_wait_for_hanging_pods(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path)) as run:
        snapshot = await run.trains(2)
        for pod in snapshot["pods"]:
            os.kill(pod["pid"], signal.SIGSTOP)
        deleting = asyncio.create_task(asyncio.to_thread(LocalJobs(home=home).delete, "job"))
        await run.until(lambda snapshot: all(pod["terminating"] for pod in snapshot["pods"]))
        run.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(15):  # half of the grace period of deleted pods
            assert await run.exit_code() == 3, run.output
            await deleting


async def test_a_killed_run_leaves_no_process(home: Path, tmp_path: Path) -> None:
    async with LocalRun(home, manifest(tmp_path)) as run:
        await run.trains(2)
        processes = processes_of(home)
        assert len(processes) >= 1 + 1 + 2 + 2, processes  # the run, etcd, agents, workers
        run.process.kill()
        assert await gone(processes, within=5)
        assert processes_of(home) == {}
    lost = LocalJobs(home=home).describe("job")
    assert not lost["run"]["alive"]
    assert lost["run"]["ended"] is None
    async with LocalRun(home, manifest(tmp_path)) as again:
        await again.trains(2)


async def test_two_jobs_run_at_once(home: Path, tmp_path: Path) -> None:
    async with (
        LocalRun(home, manifest(tmp_path, "one", replicas=1)) as one,
        LocalRun(home, manifest(tmp_path, "two", replicas=1)) as two,
    ):
        first, second = await one.trains(1), await two.trains(1)
        assert first["etcd"]["endpoint"] != second["etcd"]["endpoint"]
        assert {job["manifest"]["metadata"]["name"] for job in LocalJobs(home=home).snapshots()} == {"one", "two"}
        await asyncio.to_thread(LocalJobs(home=home).delete, "one")
        assert await one.exit_code() == 3, one.output
        assert (await asyncio.to_thread(LocalJobs(home=home).describe, "two"))["status"]["state"] == "Running"


async def test_the_name_of_a_running_job_is_taken(home: Path, tmp_path: Path) -> None:
    file = manifest(tmp_path, replicas=1)
    async with LocalRun(home, file) as first:
        await first.trains(1)
        run_id = first.record["run"]["id"]
        async with LocalRun(home, file) as second:
            assert await second.exit_code() == 2
            assert "end it with `elasticjob delete job`" in second.output
            assert run_id in second.output
        async with LocalRun(home, file, "--resume", run_id) as resumed:
            assert await resumed.exit_code() == 2
            assert "is running here already" in resumed.output
        assert first.process.returncode is None


async def test_a_deleted_run_exits_with_its_code_and_releases_its_name(home: Path, tmp_path: Path) -> None:
    file = manifest(tmp_path, replicas=1)
    async with LocalRun(home, file) as run:
        await run.trains(1)
        await asyncio.to_thread(LocalJobs(home=home).delete, "job")
        async with LocalRun(home, file) as next_run:
            await next_run.trains(1)
        assert await run.exit_code() == 3, run.output
        assert run.record["run"]["ended"]["how"] == "deleted"


async def test_a_resumed_run_finds_earlier_checkpoints(home: Path, tmp_path: Path) -> None:
    program = """
        cd $TORCHELASTIC_CHECKPOINT_DIR
        if [ -e checkpoint ]; then echo found $(cat checkpoint); exit; fi
        echo 41 > checkpoint; echo saved; while :; do sleep 0.05; done
    """
    file = manifest(tmp_path, replicas=1, command=["sh", "-c", program])
    async with LocalRun(home, file) as run:
        before = await run.trains(1)
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
        assert "was of the job job" in other.output


async def test_saving_the_manifest_applies_it_and_refuses_immutable_changes(home: Path, tmp_path: Path) -> None:
    file = manifest(tmp_path, replicas=1)
    async with LocalRun(home, file) as run:
        await run.trains(1)
        manifest(tmp_path, replicas=2)
        await run.trains(2)
        text = file.read_text()
        file.write_text(text.replace("maxReplicas: 3", "maxReplicas: 3\n  nprocPerNode: 2"))
        refused = await run.until(lambda snapshot: "Refused" in reasons(snapshot))
        assert "nprocPerNode" in refused["events"][-1]["message"]
        assert refused["manifest"]["spec"]["nprocPerNode"] == 1
        file.write_text("not: [a manifest")
        invalid = await run.until(lambda snapshot: reasons(snapshot).count("Refused") == 2)
        assert "job.yaml:" in invalid["events"][-1]["message"]
        # The scaled size stays, since the file does not set it, while the file changes another field.
        file.write_text(text.replace("replicas: 2\n", ""))
        await run.until(lambda snapshot: snapshot["manifest"]["spec"].get("replicas") == 3)
        await run.trains(3)
        kept = (Path(run.record["run"]["directory"]) / "manifest.yaml").read_text()
        assert "replicas: 2" not in kept


async def test_a_program_that_keeps_failing_ends_the_run_with_its_reason(home: Path, tmp_path: Path) -> None:
    file = manifest(tmp_path, replicas=1, command=["sh", "-c", "echo no such data >&2; exit 5"])
    async with LocalRun(home, file) as run:
        assert await run.exit_code() == 1, run.output
        assert processes_of(home) == {}
        assert run.record["status"]["state"] == "Failed"
        assert "5" in run.record["status"]["lastFailure"]["message"]


async def test_an_external_etcd_is_used_and_left_clean(home: Path, tmp_path: Path, own_etcd: EtcdServer) -> None:
    file = manifest(tmp_path, replicas=1, etcd={"endpoint": own_etcd.endpoint})
    async with LocalRun(home, file) as run:
        snapshot = await run.trains(1)
        assert snapshot["etcd"] == {"pid": None, "endpoint": own_etcd.endpoint, "restarts": 0}
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
        ({"command": None, "args": ["no-such-script.py"]}, "There is no script no-such-script.py"),
        ({"command": ["no-such-program"]}, "There is no command no-such-program"),
        ({"command": None, "args": ["--nproc-per-node=many", "x.py"]}, "many"),
        ({"env": [{"name": "PET_RDZV_ID", "value": "mine"}]}, "PET_RDZV_ID is the operator's to set"),
    ],
)
async def test_a_job_that_cannot_run_locally_is_refused_before_anything_starts(
    home: Path, tmp_path: Path, spec: dict, sentence: str
) -> None:
    async with LocalRun(home, manifest(tmp_path, **spec)) as run:
        assert await run.exit_code() == 2
        assert sentence in run.output
        assert "Traceback" not in run.output
        assert run.output.count("\n") == 1, run.output
    assert list((home / "runs").glob("*")) == []


async def test_an_unwritable_home_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    async with LocalRun(file / "home", manifest(tmp_path)) as run:
        assert await run.exit_code() == 2
        assert "set ELASTICJOB_HOME to a directory that can be written" in run.output


async def test_an_etcd_that_cannot_run_is_bad_input_and_leaves_nothing(home: Path, tmp_path: Path) -> None:
    etcd = tmp_path / "bin" / "etcd"
    etcd.parent.mkdir()
    etcd.write_text("#!/bin/sh\necho out of luck >&2; exit 1\n")
    etcd.chmod(0o755)
    path = f"{etcd.parent}:{os.environ['PATH']}"
    async with LocalRun(home, manifest(tmp_path), environ={"PATH": path}) as run:
        assert await run.exit_code() == 2
        assert "out of luck" in run.output
        assert "Traceback" not in run.output
        assert processes_of(home) == {}


async def test_unsupported_fields_are_named_in_one_warning(home: Path, tmp_path: Path) -> None:
    template = {"spec": {"volumes": [], "containers": [{"name": "worker", "resources": {}}, {"name": "sidecar"}]}}
    file = manifest(tmp_path, replicas=1, template=template)
    async with LocalRun(home, file) as run:
        snapshot = await run.trains(1)
        (warning,) = (event for event in snapshot["events"] if event["reason"] == "UnsupportedFields")
    assert warning["warning"]
    for field in ("template.spec.volumes", "template.spec.containers[worker].resources", "'sidecar'"):
        assert field in warning["message"]
