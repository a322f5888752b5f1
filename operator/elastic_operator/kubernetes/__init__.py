"""The operator on Kubernetes.

``manager`` runs the process and elects the leader. ``informer`` lists and watches objects for ``object_cache``. The
leader's reconciler works with ``backend``, which observes jobs, and with ``apply``, which carries out plans through
``writer``. ``client`` talks to the API server, ``job_store`` to the jobs' etcds.
"""
