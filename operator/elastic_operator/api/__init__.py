"""The ElasticJob API: spec, status and report, and the names that the operator gives to things."""
