"""The reasons of events that only this machine has; the others are in :class:`elastic_operator.names.EventReason`."""

from __future__ import annotations

import enum


class LocalReason(enum.StrEnum):
    """What a person would want to know of a run on this machine."""

    NOT_HONOURED = "NotHonoured"
    """Fields of the manifest that have no effect where pods are processes."""
    ETCD_DIED = "EtcdDied"
    ETCD_RESTARTED = "EtcdRestarted"
    STORE_AWAY = "StoreAway"
    """An etcd that is not ours cannot be reached."""
    STORE_BACK = "StoreBack"
    APPLIED = "Applied"
    """The manifest's file has changed, and so has the job."""
    REFUSED = "Refused"
    """The manifest's file has changed in a way that a running job does not follow."""
    NOT_RECORDED = "NotRecorded"
    """The run's folder cannot be written any more."""
    INTERRUPTED = "Interrupted"
    DELETED = "Deleted"
