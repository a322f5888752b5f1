"""Launchers under the paths that they have in torch: :mod:`.launch` and :mod:`.launcher`."""
