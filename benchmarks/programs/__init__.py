"""The programs of the measured workers.

The programs have a folder of their own, because Python first imports modules from the folder of a program. In the
folder of the benchmarks, ``operator.py`` would hide the standard library's.
"""
