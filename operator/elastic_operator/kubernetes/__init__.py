"""The operator on Kubernetes.

``manager`` runs the process and elects the leader. ``informer`` lists objects into ``object_cache``, and kopf watches
them: ``handlers`` has the handlers of kopf, ``kopf_session`` adapts kopf to the operator. The
leader's reconciler works with ``backend``, which observes jobs, and with ``apply``, which carries out plans through
``writer``. ``client`` talks to the API server, ``job_store`` to the jobs' etcds.
"""
