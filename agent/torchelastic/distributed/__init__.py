"""The launcher under its older path, :mod:`.launch`."""
