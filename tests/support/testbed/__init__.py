"""A real Kubernetes for the tests, on this machine: a control plane alone, and a whole node with real pods.

==================  ==================================================================================
module              question
==================  ==================================================================================
``cache``           where is kept what takes long to make, and how do two runs share it?
``binaries``        where do kube-apiserver, kubelet, etcd, helm … come from?
``packages``        how are Debian's packages used without being installed?
``images``          how are the images built, and without a container engine?
``control_plane``   how do etcd, API server, controller manager and scheduler run?
``node``            how does a kubelet run, safely, on anyone's machine?
``__main__``        what is prepared before the tests, and what is missing?
==================  ==================================================================================
"""
