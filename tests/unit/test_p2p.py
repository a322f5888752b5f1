"""The arguments of CoordinatorP2P."""

from __future__ import annotations

import pytest

import torchelastic
from torchelastic.errors import SettingsError
from torchelastic.p2p import CoordinatorP2P


@pytest.mark.parametrize(
    ("init_method", "message"),
    [
        ("localhost:2379/1234?min_workers=1&max_workers=2", "must be etcd://HOST:PORT/RUN_ID"),
        ("etcd://localhost:2379?min_workers=1&max_workers=2", "must be etcd://HOST:PORT/RUN_ID"),
        ("etcd://localhost:2379/1234?min_workers=1", "min_workers and max_workers must be numbers"),
        ("etcd://localhost:2379/1234?min_workers=3&max_workers=2", "1 <= min_workers <= max_workers"),
        ("etcd://localhost:2379/1234?min_workers=0&max_workers=2", "1 <= min_workers <= max_workers"),
        ("etcd://[::1/1234?min_workers=1&max_workers=2", "Invalid IPv6 URL"),
        ("etcd://me:secret@localhost:2379/1234?min_workers=1&max_workers=2", "username="),
        ("etcd://localhost:2379/1234?min_workers=1&max_workers=2&endpoint=x", 'no key "endpoint"'),
        ("etcd://localhost:2379/1234?min_workers=1&max_workers=2&color=red", 'no key "color"'),
        ("etcd://localhost:port/1234?min_workers=1&max_workers=2", "port"),
    ],
)
def test_a_wrong_init_method_is_named(init_method: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as raised:
        CoordinatorP2P("gloo", init_method, 2)
    assert "secret" not in str(raised.value)


def test_a_timeout_must_be_above_zero() -> None:
    with pytest.raises(SettingsError, match="must be above 0"):
        CoordinatorP2P("gloo", "etcd://localhost:2379/1234?min_workers=1&max_workers=2", 2, process_group_timeout=0)


def test_a_state_without_sync_is_refused_by_name() -> None:
    class MyState(torchelastic.State):
        pass

    with pytest.raises(TypeError, match=r"MyState.*sync"):
        MyState()
