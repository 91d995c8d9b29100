"""`python -m deploy.monitoring.generate [--check]`: writes the alert rules and the dashboard."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.dashboard import dashboard

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "moerelay.json"

_HEADING = "# Made by `python -m deploy.monitoring.generate` from deploy/monitoring/alerts.py.\n"


def rules_text() -> str:
    """Prometheus' rule file. Strings are written as JSON has them, which is YAML too."""
    return _HEADING + "groups:\n- name: moerelay\n  rules:\n" + "".join(_rules())


def _rules() -> Iterator[str]:
    for alert in ALERTS:
        annotations = {"summary": alert.summary, "description": alert.description, "runbook_url": alert.runbook}
        yield f"  - alert: {alert.name}\n    expr: {json.dumps(alert.expr)}\n    for: {alert.lasting}\n"
        yield f"    labels:\n      severity: {alert.severity}\n    annotations:\n"
        yield "".join(f"      {name}: {json.dumps(text)}\n" for name, text in annotations.items())


def files() -> dict[Path, str]:
    """What belongs into which file."""
    return {RULES: rules_text(), DASHBOARD: json.dumps(dashboard(), indent=1) + "\n"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.monitoring.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is not up to date")
    check = parser.parse_args(argv).check
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{'is not up to date' if check else 'written'}: {path.relative_to(ROOT)}", file=sys.stderr)
        if not check:
            path.write_text(files()[path])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
