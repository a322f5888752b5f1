"""The ``elasticjob`` command: one module for each group of subcommands, over an :mod:`elastic_operator.client`.

Large packages such as rich and kubernetes are imported when a command needs them, so that the command starts quickly.
"""
