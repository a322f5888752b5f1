"""Training in processes that survive changes of their world: the API of torchelastic 0.1."""
