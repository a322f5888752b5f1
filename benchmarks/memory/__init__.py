"""The benchmark of the memory of an agent and its workers."""
