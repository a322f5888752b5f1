"""This machine as a backend: pods are processes, etcd is a process, and the controller is the one of the cluster."""
