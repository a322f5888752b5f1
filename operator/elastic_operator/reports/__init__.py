"""The report about a job, as one HTML page."""
