"""The errors of the operator and of ``elasticjob``, one tree under one root.

    ElasticJobError
    ├── BadInput        what the user gave cannot be: the message names the field, line or value and what to change
    ├── NotFound        there is no such job, pod or rank
    └── ClusterError    the cluster (Kubernetes, or this machine) did not do what was asked; trying again may help

Each message is a sentence for a person.
"""


class ElasticJobError(Exception):
    """The root of the errors that the operator raises by itself."""


class BadInput(ElasticJobError):  # noqa: N818 - it names the cause, not the mechanism
    """What the user gave cannot be; exit code 2."""


class NotFound(ElasticJobError):  # noqa: N818
    """There is no such thing."""


class ClusterError(ElasticJobError):
    """The cluster did not do what was asked; trying again may help."""
