"""What workers run while they are measured.

In a folder of its own: Python looks for modules first in the folder of the program that it runs, and beside these there
is no ``operator.py`` that would hide the standard library's.
"""
