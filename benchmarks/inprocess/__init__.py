"""The benchmark of training in processes that survive a fault."""
