"""Kubernetes as a cluster: pods are pods, and the plan is the one that this machine gets too.

==================  ==================================================================================
module              question
==================  ==================================================================================
``api``             how is the API server talked to?
``resources``       which kinds of objects are there, and under which path?
``worker_pod``      what does a worker's pod look like?
``etcd_objects``    what do the job's own etcd and its service look like?
``observation``     what does an object of the API server say, in the words of the plan?
==================  ==================================================================================
"""
