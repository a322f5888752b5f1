"""The ``elasticjob`` command: its subcommands, on top of :mod:`elastic_operator.client`.

A command imports large packages such as rich and kubernetes only if it needs them, so that the others start quickly.
"""
