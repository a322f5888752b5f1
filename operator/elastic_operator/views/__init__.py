"""Views of a job for a terminal, the same for a job on this machine and on a cluster."""
