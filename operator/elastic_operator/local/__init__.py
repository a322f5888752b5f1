"""Jobs on this machine: pods and etcd are processes, and the controller is the same as on a cluster."""
