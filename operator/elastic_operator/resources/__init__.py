"""What the operator creates for a job: the agent command line, pod templates and the applied spec."""
