"""The Kubernetes, etcds and images that tests and benchmarks use on this machine; README.md describes them."""
