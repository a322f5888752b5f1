"""The dashboards and alerts of the chart, made by code: `python -m scripts.monitoring` writes them.

What is shown and asked stands as data in :mod:`fleet`, :mod:`job` and :mod:`alerts`; :mod:`grafana` makes dashboards of
it, and :mod:`rules` the file of alerting rules.
"""
