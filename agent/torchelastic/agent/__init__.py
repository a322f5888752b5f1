"""The agent: one process in each pod that joins the rendezvous, runs and watches the workers, and reports their exits.

The agent's process never imports torch.
"""
