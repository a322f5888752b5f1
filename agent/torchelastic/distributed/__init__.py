"""The package of the launcher's older name, as in torch: see :mod:`.launch`."""
