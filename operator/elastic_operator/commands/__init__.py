"""What ``elasticjob`` can be asked to do, a module for each command.

Each module has ``add_to(commands)``, which declares the command, and does its work in the function that it sets as the
default of ``execute``: from the parsed arguments to an exit code. What a command needs beyond the standard library is
imported when it is executed, so that ``elasticjob get`` is there at once. :mod:`elastic_operator.commands.place` says
where the jobs are that a command is about.
"""
