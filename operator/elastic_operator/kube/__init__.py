"""Kubernetes as a cluster: pods are pods, and the plan is the one that this machine gets too.

==================  ==================================================================================
module              question
==================  ==================================================================================
the API server
``api``             how is the API server talked to?
``api_error``       what does it say when it does not do what it is asked?
``page``            what does it list?
``resources``       which kinds of objects are there, and under which path?

objects
``worker_pod``      what does a worker's pod look like?
``pod_template``    how is a template completed?
``etcd_objects``    what do the job's own etcd and its service look like?
``ownership``       what ties an object to its job?
``settings``        what does the operator's set-up decide about all pods?
``observation``     what does an object of the API server say, in the words of the plan?
``container_state`` where does a container stand?
``pod_words``       why does a pod not start, and how did it end, in words?

the operator
``main``            what is ``elastic-operator``, and how does it exit?
``options``         which flags does it have?
``log_lines``       what does its log look like?
``process``         what runs in its process, and in which order does it begin and end?
``leading``         which of several copies acts?
``watching``        how does it hear of changes (kopf)?
``watch_session``   over which connection, and what is there as a watch begins?
``listing``         how does it learn what watches miss?
``cache``           what does it know of the API server's objects?
``stores``          what does it know of what the agents say?
``misread``         what is said of a job that it cannot read?
``cluster``         what is known of one job, and how is a plan carried out?
``managed_etcd``    how is a job's own etcd made and removed?
``writer``          how is something written so that it is known at once?
``ledger``          what would the API server not make, and when is it tried again?
``events``          how is a person told?
``readiness``       which pods are ready?
``departed``        which pods are gone, and were not replaced yet?
``farewell``        what did a deleted pod say last?
``web``             what do probes and Prometheus see?
``metrics``         what does it count?

``elasticjob``
``user_api``        how does a person's command talk to the API server?
``kubeconfig``      which kubeconfig does a person mean?
``jobs``            what does a person ask of jobs on a cluster?
``snapshot``        what is shown of one?
``agent_pages``     what do the agents of its jobs measure?
``pod_logs``        whose is a line of a log?
``job_logs``        what have the pods of a job printed?
``log_following``   what do they print now?
``task_group``      how do several tasks fail as one?
==================  ==================================================================================
"""
