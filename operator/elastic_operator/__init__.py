"""The ElasticJob operator and the ``elasticjob`` command."""
