"""The test bed on this machine: a control plane, a node with real pods, and several versions of etcd.

=====================  ==================================================================================
module                 content
=====================  ==================================================================================
``__main__``           the command that prepares everything before the tests
``availability``       the preparation, missing parts and their remedies
``collection``         pytest hooks: preparation for the selected tests, and their distribution
``cache``              the cache folder, and its locks
``binaries``           kube-apiserver, kubelet, etcd, helm …
``packages``           Debian's packages, unpacked without an installation
``images``             the images, and when they are rebuilt
``image_*``            building images without a container engine
``installation``       keys, kubeconfig and command lines of a control plane
``cluster``            the operations of a test on any cluster
``control_plane``      etcd, API server, controller manager and scheduler
``node``               a node with a kubelet, isolated from the machine
``node_*``             its namespaces, control groups and clean-up
``daemons``            processes that end with the tests
=====================  ==================================================================================
"""
