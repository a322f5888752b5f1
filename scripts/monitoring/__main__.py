"""``python -m scripts.monitoring``: writes the dashboards and the alerting rules of the chart."""

from __future__ import annotations

from scripts.monitoring.files import ROOT, files

if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))
