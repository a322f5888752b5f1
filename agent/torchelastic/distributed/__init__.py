"""Torch's older import path of the launcher: see :mod:`.launch`."""
