"""What the tests run on, on this machine: a control plane alone, a whole node with real pods, etcds of any version.

=====================  ==================================================================================
module                 question
=====================  ==================================================================================
``__main__``           how is all of it made before the tests?
``availability``       what is missing, and what would bring it?
``collection``         how is it made for the tests that are wanted, and said where it cannot be?
``steps``              what is made in which order, and how long does it take?
``cache``              where is kept what takes long to make, and how do two runs share it?
``binaries``           where do kube-apiserver, kubelet, etcd, helm … come from?
``packages``           how are Debian's packages used without being installed?
``images``             which images are there, and when are they made anew?
``image_*``            how are they made without a container engine, and without a trace?
``installation``       how are the parts of a Kubernetes told of each other?
``cluster``            what can a test do with any of the clusters?
``control_plane``      how do etcd, API server, controller manager and scheduler run?
``kwok``               how are there thousands of pods that nobody runs?
``user_cluster``       how is a cluster of the user's used, where the user says so?
``node``               how does a kubelet run, safely, on anyone's machine?
``node_*``             what does that take: namespaces, control groups, a keeper that clears away?
``commands``           how is a command run, and what is said where it fails?
``daemons``            how does a process run that ends with the tests, however they end?
=====================  ==================================================================================
"""
