"""What the benchmarks share: command line, report, processes, etcd, and the reports of workers."""
