"""The report of a job's run as one HTML page."""
