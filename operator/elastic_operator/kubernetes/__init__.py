"""The operator on Kubernetes.

``manager`` runs the process, whose leader ``leader_election`` elects. ``informer`` lists objects into ``object_cache``,
and kopf watches them: ``handlers`` are its handlers, and ``kopf_session`` adapts it to the operator. The leader's
reconciler works with ``backend``, which observes jobs, and with ``executor``, which executes plans through ``writer``.
``client`` talks to the API server, ``job_store`` to the jobs' etcds.
"""
