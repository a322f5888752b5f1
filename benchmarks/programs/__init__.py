"""The programs of the measured workers.

They are in their own folder because Python imports modules from the folder of a program first, and ``operator.py``
of the benchmarks would hide the standard library's.
"""
