"""Stands for the imports of a training program, which take a second."""

import time

time.sleep(1)
