"""What agents, workers, the operator and the command exchange: keys, records, variables, exit codes and output."""
