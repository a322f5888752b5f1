"""The ``elasticjob`` command: one module for each subcommand, over a :class:`elastic_operator.client.JobClient`.

Modules beyond the standard library are imported when a command is executed, so that the command starts quickly.
"""
