"""The benchmark of the rendezvous."""
