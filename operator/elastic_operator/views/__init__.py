"""The text that a terminal shows about a job, which is the same for jobs on this machine and on a cluster."""
