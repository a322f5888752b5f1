"""torchelastic: elastic training for PyTorch."""
