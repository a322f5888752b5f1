"""The operator on Kubernetes.

``manager`` puts the process together. ``informer`` lists and watches into ``store``. The leader's reconciler works with
``backend``, which observes jobs (``observe``) and carries out plans (``apply``). ``client`` talks to the API server,
``job_store`` to the jobs' etcds.
"""
