"""The arguments of CoordinatorP2P."""

from __future__ import annotations

import datetime as dt
import math
import re
from typing import Any

import pytest

import torchelastic
from torchelastic.errors import SettingsError
from torchelastic.p2p import CoordinatorP2P

URL = "etcd://localhost:2379/1234?min_workers=2&max_workers=4"


@pytest.mark.parametrize(
    ("init_method", "message"),
    [
        (None, "must be etcd://HOST:PORT/RUN_ID.*, not of the type NoneType"),
        (URL.encode(), "must be etcd://HOST:PORT/RUN_ID.*, not of the type bytes"),
        ("", "must be etcd://HOST:PORT/RUN_ID"),
        ("localhost:2379/1234?min_workers=1&max_workers=2", "must be etcd://HOST:PORT/RUN_ID"),
        ("etcd://localhost:2379?min_workers=1&max_workers=2", "must be etcd://HOST:PORT/RUN_ID"),
        ("etcd://localhost:2379/1234?min_workers=1", "init_method max_workers=: must be a whole number from 1"),
        ("etcd://localhost:2379/1234?min_workers=0&max_workers=2", "init_method min_workers=0: must be a whole number"),
        (f"{URL}&max_workers={'9' * 5000}", "init_method max_workers=9+: must be a whole number"),
        (f"{URL}&min_workers=5", "init_method: min_workers=5 is above max_workers=4"),
        ("etcd://[::1/1234?min_workers=1&max_workers=2", "Invalid IPv6 URL"),
        ("etcd://me:hush@localhost:2379/1234?min_workers=1&max_workers=2", "username="),
        (f"{URL}&endpoint=x", 'init_method: there is no key "endpoint"'),
        (f"{URL}&color=red", 'init_method: there is no key "color"'),
        (f"{URL}&timeout=soon", "init_method timeout=soon: must be a time in seconds"),
        (f"{URL}&lease=", "init_method lease=: must be a time in seconds"),
        (f"{URL}&username=me", "init_method username: username requires password"),
        (f"{URL}&protocol=http&cacert={__file__}", "cacert in init_method: certificates need protocol=https"),
        (URL.replace("2379", "port"), "init_method: .*port"),
    ],
)
def test_a_wrong_init_method_is_named(init_method: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=f"^[^\\n]*{message}[^\\n]*[.?]$") as raised:
        CoordinatorP2P("gloo", init_method, 4)
    assert "hush" not in str(raised.value)
    assert "--" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("c10d_backend", value, "must be gloo, mpi") for value in (None, 5, "", "glo", "gloo,nccl", ":gloo", "cpu:")),
        *(
            ("max_num_trainers", value, r"must be a whole number, at least min_workers \(2\)")
            for value in (0, -1, 1, "3", None, True, 2.0)
        ),
        *(
            (name, value, "must be a number of milliseconds above 0")
            for name in ("process_group_timeout", "coordinator_pg_timeout")
            for value in (0, -1, None, "x", math.nan, math.inf, 1e300, True, dt.timedelta(seconds=1))
        ),
    ],
)
def test_a_wrong_argument_is_named(name: str, value: Any, message: str) -> None:
    arguments = {"c10d_backend": "gloo", "init_method": URL, "max_num_trainers": 4, name: value}
    with pytest.raises(SettingsError, match=f"^{re.escape(f'{name}={value!r}')}: {message}.*\\.$"):
        CoordinatorP2P(**arguments)


@pytest.mark.parametrize("backend", ["gloo", "NCCL", "cpu:gloo", "cpu:gloo,cuda:nccl"])
def test_a_backend_may_be_written_as_for_torch(backend: str) -> None:
    CoordinatorP2P(backend, URL, 4)


def test_a_state_without_sync_is_refused_by_name() -> None:
    class MyState(torchelastic.State):
        pass

    with pytest.raises(TypeError, match=r"MyState.*sync"):
        MyState()
