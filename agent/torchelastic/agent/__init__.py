"""The agent: one in each pod, it meets its peers, runs and watches the workers, and says what happened.

Its process never imports torch.
"""
