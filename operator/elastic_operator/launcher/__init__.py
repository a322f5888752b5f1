"""Places where :mod:`torchelastic.launcher` can call functions; the launcher finds them by entry points."""
