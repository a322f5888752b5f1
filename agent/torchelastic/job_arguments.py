"""From what the operator says of the job, in the environment, to its name and age, which an agent's /metrics tells."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from torchelastic.contract import Env
from torchelastic.flags import Given

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME: Final = r"[A-Za-z0-9._-]{1,253}"
_LATEST: Final = 1e11
"""In seconds since 1970, some 3,000 years from now; in milliseconds it was 1973."""


def read_job(environ: Mapping[str, str]) -> tuple[str, str]:
    """The namespace and the name of the job; both empty where nobody says them.

    Raises:
        SettingsError: they cannot be read.
    """
    if not (text := environ.get(Env.JOB)):
        return "", ""
    namespace, slash, name = text.partition("/")
    if not slash or not re.fullmatch(_NAME, name) or not re.fullmatch(_NAME, namespace or name):
        raise Given(Env.JOB, text).refused(
            "this is a job's namespace and name, as in default/digits; the namespace may be empty"
        )
    return namespace, name


def read_job_created(environ: Mapping[str, str]) -> float | None:
    """When the job was made, in seconds since the Unix epoch; None where nobody says it, or says 0.

    Raises:
        SettingsError: it cannot be read.
    """
    if not (text := environ.get(Env.JOB_CREATED)):
        return None
    given = Given(Env.JOB_CREATED, text)
    seconds = given.seconds(zero=True)
    if seconds > _LATEST:
        raise given.refused("this is a time in seconds since 1970, for example 1767225600; is it in milliseconds?")
    return seconds or None
