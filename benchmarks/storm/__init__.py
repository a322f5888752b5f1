"""The benchmark of training through random faults."""
