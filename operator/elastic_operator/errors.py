"""The errors of the operator and of ``elasticjob``.

    ElasticJobError
    ├── BadInput        the user's input is wrong: the message names the field, line or value and what to change
    ├── NotFound        there is no such job, pod or rank
    └── ClusterError    the cluster (Kubernetes, or this machine) failed; trying again may help

Each message is a sentence for the user.
"""


class ElasticJobError(Exception):
    """The base class of the operator's errors."""


class BadInput(ElasticJobError):  # noqa: N818 - it names the cause, not the mechanism
    """The user's input is wrong; the command exits with code 2."""


class NotFound(ElasticJobError):  # noqa: N818
    """There is no such job, pod or rank."""


class ClusterError(ElasticJobError):
    """The cluster failed; trying again may help."""
