"""The command line of ``torchelastic-run``: flags, environment variables and their errors."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from torchelastic.config import machine
from torchelastic.config.flags import FLAGS
from torchelastic.config.parse import parse
from torchelastic.config.settings import (
    AgentSettings,
    Program,
    ProgramKind,
    RendezvousSettings,
    StartMethod,
    Streams,
)
from torchelastic.errors import SettingsError
from torchelastic.protocol.codec import decode
from torchelastic.protocol.pod import Env, ExitCode, TerminationMessage
from torchelastic.protocol.records import PROTOCOL_VERSION, ResumeRecord, SizeRecord
from torchelastic.run import main

SEVERAL = "--rdzv-endpoint=127.0.0.1:2379 --rdzv-id=run"
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a program, a package, certificates and a command in it."""
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    for name in ("empty/x", "server/ca.crt", "both/ca.crt", "both/tls.crt", "both/tls.key"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    (tmp_path / "train.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(given: str) -> AgentSettings:
    """Parse flags for a program; words of the form NAME=VALUE become environment variables."""
    words = given.split(" ") if given else []
    variables = [word for word in words if re.match(r"[A-Z_]+=", word)]
    flags = [word for word in words if word not in variables]
    return parse([*flags, "train.py"], dict(word.split("=", 1) for word in variables))


def sentence(given: str) -> str:
    """Return the error for these words, and check that the error consists of sentences."""
    with pytest.raises(SettingsError) as caught:
        run(given)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?", ")"))
    assert not message.endswith(("..", "?."))
    return message


# -- valid flags


def test_without_flags_one_worker_runs_on_one_node_without_etcd() -> None:
    settings = run("")
    assert settings == AgentSettings(
        rendezvous=RendezvousSettings(settings.rendezvous.run_id, SizeRecord(min=1, max=1, desired=1)),
        store=None,
        node_name=socket.gethostname(),
        address="127.0.0.1",
        topology_key=machine.host_id(),
        program=Program(ProgramKind.SCRIPT, ("train.py",), StartMethod.FORK_SERVER),
        job=("", settings.rendezvous.run_id),
    )
    assert run("").rendezvous.run_id != settings.rendezvous.run_id


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ("--nnode=1 --rdzv_endpoint=e", "rendezvous.size", SizeRecord(min=1, max=1, desired=1)),
        ("--nnodes=2 --rdzv-id=7 --rdzv-endpoint=e", "rendezvous.size", SizeRecord(min=2, max=2, desired=2)),
        ("--nnodes=1:4 --rdzv-id=7 --rdzv-endpoint=e", "rendezvous.size", SizeRecord(min=1, max=4)),
        ("--nproc-per-node 3", "workers", 3),
        ("--non-retryable-exit-codes=3,64-66", "non_retryable_exit_codes", frozenset({3, 64, 65, 66})),
        ("--uncharged-exit-codes=254-255,4", "uncharged_exit_codes", frozenset({4, 254, 255})),
        ("--rdzv-endpoint=localhost", "store.endpoints", ("localhost:2379",)),
        ("--rdzv-endpoint=a:1,b,c:3,a:1", "store.endpoints", ("a:1", "b:2379", "c:3")),
        ("--rdzv-endpoint=HTTP://a,http://b:1", "store.endpoints", ("a:2379", "b:1")),
        ("--rdzv-endpoint=[fe80::1]", "store.endpoints", ("[fe80::1]:2379",)),
        ("--rdzv-endpoint=https://etcd.example.org/", "store.protocol", "https"),
        ("--rdzv-endpoint=e --rdzv-conf=cacert=both/ca.crt", "store.protocol", "https"),
        ("--rdzv-endpoint=e --rdzv-conf=tls=both,key=train.py", "store.ca_cert", "both/ca.crt"),
        ("--rdzv-endpoint=e --rdzv-conf=tls=both,key=train.py", "store.key", "train.py"),
        ("--rdzv-endpoint=e --rdzv-conf=tls=server", "store.cert", None),
        ("--rdzv-endpoint=e --rdzv-conf=username=root,password=a=b", "store.password", "a=b"),
        ("--rdzv-conf=timeout=60", "rendezvous.join_timeout", 60.0),
        ("--rdzv-conf='join_timeout=60'", "rendezvous.join_timeout", 60.0),
        ("--rdzv-conf=join-timeout=60,timeout=9", "rendezvous.join_timeout", 60.0),
        ("--rdzv-conf=last_call_timeout=1.5,lease=7", "rendezvous.last_call_timeout", 1.5),
        ("--rdzv-conf=crash_loop_seconds=2", "rendezvous.crash_loop_seconds", 2.0),
        ("--rdzv-endpoint=e --rdzv-backend=etcd", "store.version", None),
        ("--rdzv-endpoint=e --rdzv-backend=ETCD_V3", "store.version", 3),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=192.0.2.1", "store.endpoints", ("192.0.2.1:29400",)),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=192.0.2.1", "etcd_addresses", ()),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1", "etcd_addresses", ("127.0.0.1",)),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1", "rendezvous.run_id", "none"),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-id=a", "rendezvous.run_id", "a"),
        ("--nnodes=2 --rdzv-backend=c10d", "store.endpoints", ("localhost:29400",)),
        ("--nnodes=2 --rdzv-backend=static", "store.endpoints", ("127.0.0.1:29500",)),
        ("--nnodes=2 --master-addr=::1", "store.endpoints", ("[::1]:29500",)),
        ("--nnodes=2 --node-rank=0 --master-port=9", "store.endpoints", ("127.0.0.1:9",)),
        ("--nnodes=2 --node-rank=1 --rdzv-id=7 --rdzv-endpoint=e", "store.endpoints", ("e:2379",)),
        ("--node-rank=1", "node_rank", 1),
        ("--rdzv-id -7", "rendezvous.run_id", "-7"),  # a value may start with a dash
        ("--standalone --rdzv-id=mine", "rendezvous.run_id", "mine"),
        ("--standalone --rdzv-backend=c10d --rdzv-endpoint=localhost:0", "store", None),
        ("--start-method=spawn", "program.start_method", StartMethod.EXEC),
        ("--start-method=forkserver", "program.start_method", StartMethod.FORK_SERVER),
        ("--preload=numpy,json.tool,,beside,numpy", "program.preload", ("numpy", "json.tool", "beside")),
        ("--preload=none", "program.preload", ()),
        ("--preload=none", "program.learns", False),
        ("--role=trainer --monitor-interval=0.5", "role", "trainer"),
        ("--log-dir=/tmp/none/a", "logs.directory", Path("/tmp/none/a")),
        ("--nproc-per-node=3 --log-dir=. -r 3", "logs.redirects", dict.fromkeys(range(3), Streams.BOTH)),
        ("--nproc-per-node=3 --log-dir=. -t0:1,2:3", "logs.tee", {0: Streams.OUT, 2: Streams.BOTH}),
        ("--topology-key=rack-7", "topology_key", "rack-7"),
        # the operator's variables, and flags that override them
        (f'TORCHELASTIC_SIZE={{"min":1,"max":4,"generation":3}} {SEVERAL}', "rendezvous.size.generation", 3),
        ("TORCHELASTIC_UNIQUE_RUN=1", "rendezvous.unique_run", True),
        ('TORCHELASTIC_RESUME={"round":7,"restarts":2}', "rendezvous.resume", ResumeRecord(round=7, restarts=2)),
        ("TORCHELASTIC_JOB=team/digits", "job", ("team", "digits")),
        ("TORCHELASTIC_JOB=/digits TORCHELASTIC_RESUME=", "job", ("", "digits")),
        ("TORCHELASTIC_JOB_CREATED=1767225600.5", "job_created", 1767225600.5),
        ("TORCHELASTIC_NODE_NAME=a --node-name=b", "node_name", "b"),
        ("TORCHELASTIC_NODE_ADDRESS=10.0.0.1 --local-addr=[fd00::2]", "address", "fd00::2"),
        ("TORCHELASTIC_METRICS_PORT=0 PET_METRICS_PORT=2", "metrics_port", 2),
        ("TORCHELASTIC_TERMINATION_LOG=/a", "termination_log", Path("/a")),
        # the command line overrides variables, and an empty variable is ignored
        ("PET_NPROC_PER_NODE=3", "workers", 3),
        ("PET_RDZV_ID=a --rdzv-id=b", "rendezvous.run_id", "b"),
        ("PET_NNODES= PET_RDZV_ENDPOINT=", "store", None),
        ("PET_MODULE=0 PET_SHUTDOWN_TIMEOUT=0", "program.kind", ProgramKind.SCRIPT),
        # the certificates of a job are for its own etcd only
        ("PET_RDZV_ENDPOINT=e TORCHELASTIC_ETCD_TLS=both", "store.protocol", "https"),
        ("PET_RDZV_ENDPOINT=e TORCHELASTIC_ETCD_TLS=both --rdzv-endpoint=f", "store.protocol", "http"),
        (
            "PET_RDZV_ENDPOINT=e TORCHELASTIC_ETCD_TLS=both --nnodes=2 --rdzv-endpoint=localhost --rdzv-backend=c10d",
            "store.endpoints",
            ("localhost:29400",),
        ),
    ],
)
def test_flags_and_variables_become_settings(given: str, setting: str, value: object) -> None:
    assert attrgetter(setting)(run(given)) == value


def test_auto_means_all_gpus_or_without_gpus_all_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = "CUDA_VISIBLE_DEVICES="
    assert run("--nproc-per-node=cpu").workers == run(f"--nproc-per-node=auto {hidden}").workers == machine.cpu_count()
    assert sentence(f"--nproc-per-node=gpu {hidden}").startswith("--nproc-per-node gpu: no GPU is visible on this node")
    monkeypatch.setattr(machine, "gpu_count", lambda _: 4)
    assert (run("--nproc-per-node=auto").workers, run("--nproc-per-node=GPU").workers) == (4, 4)
    monkeypatch.setattr(machine, "xpu_count", lambda: 2)
    assert run("--nproc-per-node=xpu").workers == 2


# -- the program


def test_arguments_after_the_program_belong_to_the_program() -> None:
    arguments = ["--nnodes", "7", "--", "-m", "--help", "--rdzv", "-x", "--lr=0.1"]
    settings = parse(["--nproc-per-node", "2", "train.py", *arguments], {})
    assert settings.program.argv == ("train.py", *arguments)
    assert settings.rendezvous.size.max == 1
    assert parse(["--standalone", "--", "train.py", "--", "a"], {}).program.argv == ("train.py", "--", "a")


@pytest.mark.parametrize("python", ["python", "python3", VERSION, sys.executable])
def test_a_python_command_line_is_treated_as_a_python_program(python: str) -> None:
    script = parse(["--no-python", "--start-method=exec", python, "train.py", "-m", "y"], {}).program
    assert script == Program(ProgramKind.SCRIPT, ("train.py", "-m", "y"), StartMethod.EXEC)
    module = parse(["--no-python", python, "-m", "pkg.train", "--lr", "1"], {}).program
    assert module == parse(["-m", "pkg.train", "--lr", "1"], {}).program
    assert (module.kind, module.argv) == (ProgramKind.MODULE, ("pkg.train", "--lr", "1"))


COMMANDS = ("./train.sh a", "python", "python -u x.py", "python -m", "python -", "python2 x.py", "/opt/bin/python x.py")


@pytest.mark.parametrize("line", COMMANDS)
def test_any_other_command_line_is_a_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda command, **_: command)
    assert parse(["--no-python", *line.split()], {}).program == Program(ProgramKind.COMMAND, tuple(line.split()))


def test_a_folder_with_a_main_module_is_a_program(folder: Path) -> None:
    (folder / "pkg" / "__main__.py").touch()
    assert parse(["pkg"], {}).program.argv == ("pkg",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["nosuch.py"], r"^Script nosuch.py was not found in /.*\.$"),
        (["--no-python", "python", "nosuch.py"], r"^Script nosuch.py was not found in"),
        (["--no-python", "no-such-program"], r"^Command no-such-program was not found:"),
        (["--no-python", "./train.py"], r"^Command ./train.py was not found:"),
        (["-m", "nosuch.module"], r"^Module nosuch.module was not found in"),
        (["pkg"], r"^pkg is a folder without a __main__.py: pass the path of a Python file in it\.$"),
        (["x" * 5000], r"^Script xxxx"),
        (["ls"], r"to run the command ls, put --no-python before it\.$"),
        (["--nproc-per-node=2"], "^The program is missing"),
        (["-m", "--no-python", "x"], "cannot be combined"),
        (["--start-method=thread", "train.py"], "^--start-method thread: must be fork-server or exec"),
    ],
)
def test_a_program_that_cannot_run_is_refused(line: list[str], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        parse(line, {})


def test_local_addr_also_selects_the_network_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "interface_of", {"10.0.0.7": "eth1", "fd00::2": "eth2"}.get)
    assert run("--local-addr=10.0.0.7").interface == "eth1"
    assert run("PET_LOCAL_ADDR=[fd00::2]").interface == "eth2"
    assert run(f"{Env.NODE_ADDRESS}=10.0.0.7").interface == ""
    assert run("").interface == ""


def test_the_operators_size_overrides_nnodes_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    size = f'{Env.SIZE}={{"min":1,"max":4,"desired":2}} {SEVERAL}'
    assert run(f"--nnodes=2:8 {size}").rendezvous.size.max == 4
    assert "--nnodes ignored: the operator sets the number of nodes, 1 to 4" in caplog.text
    caplog.clear()
    assert run(f"--nnodes=1:4 {size}").rendezvous.size.desired == 2
    assert caplog.records == []


def test_an_unknown_protocol_version_is_reported_in_the_termination_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    termination_log = folder / "termination-log"
    monkeypatch.setenv(Env.PROTOCOL, "7")
    monkeypatch.setenv(Env.TERMINATION_LOG, str(termination_log))
    with pytest.raises(SystemExit) as raised:
        main(["--a-flag-that-only-version-7-knows", "--no-python", "--", "train.sh"])

    assert raised.value.code == ExitCode.BAD_INPUT
    termination_message = decode(termination_log.read_bytes(), TerminationMessage)
    assert termination_message.reason == "BadInput"
    assert "The operator uses version 7" in termination_message.message
    assert f'"protocol":{PROTOCOL_VERSION}' in termination_log.read_text()
    assert termination_message.message in capsys.readouterr().err


def test_the_master_address_is_ignored_with_one_warning_on_one_node(caplog: pytest.LogCaptureFixture) -> None:
    run("--nnodes=2 --node-rank=0 --master-port=29501 PET_MASTER_ADDR=127.0.0.1")
    assert not caplog.records
    run("--node-rank=0 --master-port=29501 PET_MASTER_ADDR=127.0.0.1")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("PET_MASTER_ADDR and --master-port ignored: the nodes agree")


# -- invalid flags and variables


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--nnodes=4:1", "--nnodes 4:1: the minimum is above the maximum; did you mean 1:4?"),
        ("--nnodes=0", "--nnodes 0: must be a number of nodes from 1 to 1,000,000, or MIN:MAX, for example 2 or 1:4."),
        ("--nnodes=2 --rdzv-endpoint=e", "--rdzv-id is missing"),
        (
            "--nnodes=2 --rdzv-id=a",
            "A run of up to 2 nodes needs the address of one of them: set --rdzv-backend c10d and --rdzv-endpoint H",
        ),
        (
            "--nproc-per-node=1.5",
            "--nproc-per-node 1.5: must be a whole number from 1 to 10000, or auto, cpu, gpu or xpu.",
        ),
        (
            "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a,b",
            "--rdzv-endpoint a,b: with c10d, the endpoint is HOST:PORT of one node, without TLS.",
        ),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:0", "a port is a number from 1 to 65535"),
        ("--nnodes=2 --master-port=http", "--master-port http: must be a whole number from 1 to 65535."),
        ("--rdzv-backend=etcd-v4", "--rdzv-backend etcd-v4: unknown rendezvous; use c10d, or remove this flag"),
        ("--rdzv-endpoint=::1", "put it into brackets: [::1]:2379"),
        ("--rdzv-endpoint=etcd:0", "a port is a number from 1 to 65535"),
        ("--rdzv-endpoint=http://etcd/v3", "is not an address"),
        ("--rdzv-endpoint=ftp://etcd", "http:// or https://"),
        ("--rdzv-endpoint=http://a,https://b", "choose http:// or https://"),
        ("--rdzv-endpoint=a,,b", "one of the addresses is empty"),
        ("--rdzv-endpoint=e --rdzv-conf=secret_file=/dev/null", "secret_file=/dev/null: the file is empty."),
        ("--rdzv-endpoint=e --rdzv-conf=secret_file=/missing", "/missing: there is no readable text file."),
        (f"--rdzv-endpoint=e --rdzv-conf=secret_file={__file__}", "only an etcd that a node serves has a secret"),
        ("--rdzv-endpoint=root:hush@etcd", "username=… and password=… in --rdzv-conf"),
        ("--rdzv-conf=lese=3", '--rdzv-conf: there is no key "lese". Did you mean lease?'),
        ("--rdzv-conf=rack=0", '--rdzv-conf: there is no key "rack". The keys are join_timeout, '),
        ("--rdzv-conf=lease=0", "--rdzv-conf lease=0: must be a time in seconds, above 0."),
        ("--rdzv-conf=crash_loop_limit=0", "--rdzv-conf crash_loop_limit=0: must be a whole number from 1 to 1000000."),
        ("--rdzv-conf=lease", "--rdzv-conf: it takes KEY=VALUE pairs"),
        ("--rdzv-conf=password=hush,hush", "--rdzv-conf: it takes KEY=VALUE pairs"),
        ("--rdzv-conf=protocol=tcp", "--rdzv-conf protocol=tcp: must be one of http, https."),
        ("--rdzv-conf=cacert=missing.pem", "--rdzv-conf cacert=missing.pem: there is no such file."),
        ("--rdzv-conf=cacert=" + "x" * 5000, ": there is no such file."),
        ("--rdzv-conf=tls=empty", "--rdzv-conf tls=empty: there is no ca.crt in this folder."),
        (
            f"{SEVERAL} --rdzv-conf=protocol=http,tls=both",
            "in --rdzv-conf: certificates need protocol=https",
        ),
        (f"{SEVERAL} --rdzv-conf=key=train.py", "--rdzv-conf key: key requires cert."),
        (f"{SEVERAL} --rdzv-conf=username=root", "--rdzv-conf username: username requires password."),
        (f"{SEVERAL} --rdzv-conf=password=hush", "--rdzv-conf password: password requires username."),
        (
            "--rdzv-endpoint=http://e --rdzv-conf=protocol=https",
            "protocol=https: --rdzv-endpoint specifies http://; set only one",
        ),
        ("--shutdown-timeout=inf", "--shutdown-timeout inf: must be a time in seconds, 0 or more."),
        ("--heartbeat-timeout=0", "--heartbeat-timeout 0: must be a time in seconds, above 0."),
        (
            "--non-retryable-exit-codes=0",
            "--non-retryable-exit-codes 0: must be exit codes from 1 to 255 with commas between them",
        ),
        (
            "--uncharged-exit-codes=255-256",
            "--uncharged-exit-codes 255-256: must be exit codes from 1 to 255 with commas",
        ),
        ("--port-range=29400", "--port-range 29400: must be the first and the last of at least 16 ports from 1024"),
        ("--port-range=29400-29414", "--port-range 29400-29414: must be the first"),
        ("--port-range=1000-2000", "--port-range 1000-2000: must be the first"),
        ("--topology-key=", "--topology-key needs a value: NAME."),
        ("--preload=torch;os", "--preload torch;os: must be names of modules with commas between them"),
        ("--max-restarts=3x", "--max-restarts 3x: must be a whole number from 0 to 1000000."),
        ("--max-restarts=" + "9" * 5000, "--max-restarts 9999"),
        ("--node-name=" + "n" * 241, "--node-name nnnn"),
        ("--local-addr=" + "a." * 127, "--local-addr a.a."),
        ("--local-addr=a_b:1", "--local-addr a_b:1: must be a host name or an IP address, without a port."),
        ("--module=pkg", "--module takes no value."),
        ("--nprocs=2", "There is no flag --nprocs. Did you mean --nproc-per-node?"),
        ("--max_restrat=2", "There is no flag --max_restrat. Did you mean --max-restarts?"),
        ("--xyzzy", "There is no flag --xyzzy. torchelastic-run --help lists all flags."),
        ("-q", "There is no flag -q. "),
        ("--n=1", "There is no flag --n. Did you mean --nnodes?"),
        ("--help=1", "--help takes no value."),
        ("--log-dir=x -r=4", "-r 4: must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"),
        ("--log-dir=x --tee=1:3", "--tee 1:3: there is no local rank 1: this node has 1 worker."),
        ("--log-dir=train.py/x", "--log-dir train.py/x: "),
        ("--logs-specs=mine", "--logs-specs mine: no installed package has this entry point"),
        ("PET_STANDALONE=maybe", "PET_STANDALONE=maybe: must be 1 for on or 0 for off."),
        ("PET_RDZV_CONF=lease=0", "PET_RDZV_CONF lease=0: must be a time"),
        ("TORCHELASTIC_PROTOCOL=2", "The operator uses version 2 of the protocol"),
        ("TORCHELASTIC_SIZE=many", "TORCHELASTIC_SIZE=many: this is not a SizeRecord"),
        ("TORCHELASTIC_SIZE=\udcff", "TORCHELASTIC_SIZE=\udcff: this is not a SizeRecord"),
        ('TORCHELASTIC_RESUME={"round":-1}', 'TORCHELASTIC_RESUME={"round":-1}: this is not a ResumeRecord'),
        ("TORCHELASTIC_METRICS_PORT=70000", "TORCHELASTIC_METRICS_PORT=70000: must be a whole number from 0 to 65535."),
        (
            "TORCHELASTIC_NODE_ADDRESS=10.0.0.1:80",
            "TORCHELASTIC_NODE_ADDRESS=10.0.0.1:80: must be a host name or an IP",
        ),
        ("TORCHELASTIC_NODE_NAME=\t", "TORCHELASTIC_NODE_NAME=\t: must be a name"),
        ("TORCHELASTIC_JOB_CREATED=nan", "TORCHELASTIC_JOB_CREATED=nan: must be a time in seconds, 0 or more."),
    ],
)
def test_an_invalid_flag_or_variable_is_explained(given: str, expected: str) -> None:
    message = sentence(given)
    assert expected in message
    assert "hush" not in message


# -- help


def test_help_lists_every_flag_in_groups_and_version_prints_the_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SettingsError, match=r"^--nnodes needs a value: N\|MIN:MAX\.$"):
        parse(["--nnodes"], {})
    with pytest.raises(SystemExit) as exit_:
        parse(["--nnodes=2", "--help", "no-such-program", "--no-such-flag"], {})
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: torchelastic-run ")
    for heading, flags in FLAGS.items():
        assert f"{heading}:" in text
        for flag in flags:
            assert f"--{flag.name}" in text
    with pytest.raises(SystemExit) as exit_:
        parse(["--version"], {})
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("torchelastic-run 0.")


def test_parsing_imports_no_heavy_modules() -> None:
    program = (
        "import sys, os; from torchelastic.config.parse import parse; parse(['train.py'], {}); "
        "print([name for name in ('torch', 'aiohttp', 'argparse', 'prometheus_client') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output == "[]\n"


def test_the_older_launcher_module_has_the_same_help() -> None:
    def help_of(module: str) -> str:
        command = [sys.executable, "-m", module, "--help"]
        environ = {**os.environ, "COLUMNS": "100"}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout

    assert help_of("torchelastic.distributed.launch") == help_of("torchelastic.run") != ""
