"""This machine as a cluster: pods are processes, etcd is a process, and the plan is the one that Kubernetes gets.

==================  ==================================================================================
module              question
==================  ==================================================================================
``run``             what happens from ``elasticjob run FILE`` to its exit code?
``running``         how are the plan, the processes and those who look on joined?
``ending``          in which ways does a run end?
``cluster``         what is observed of the job here, and how is a plan carried out?
``live_job``        what is the job's object now, and which changes to it are allowed?
``pod_command``     what is a pod's process started with?
``pod_process``     how does a pod live as a process?
``etcd_process``    how does the job's etcd live as a process?
``etcd_binary``     which etcd is started?
``tether``          why does nothing outlive ``elasticjob run``, however it ends?
``follow``          has a file changed?
``not_honoured``    what of a manifest can a process not honour?
``run_folder``      where does a run keep what belongs to it?
``name_claim``      why is a job's name unique among the runs that are alive?
``snapshot``        what is told of a run, and in which form?
``publisher``       who is told of a change, and how often?
``control``         how do other terminals reach a run? (the side that serves)
``client``          how do other terminals reach a run? (the side that asks)
``agent_pages``     what do the agents measure?
``log_files``       where is a rank's output, and how is it followed across epochs?
``view``            what does ``elasticjob run`` show while the job goes on?
``render``          how does the live picture look?
``hints``           what can be tried in a second terminal, and how is it spelled there?
``demo``            which acts does the demo play?
``demo_stage``      what does the demo wait for, and whom does it kill?
``act``             how is an act shown?
==================  ==================================================================================
"""
