from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dsde.telemetry.monitoring import ALERTS, PANELS, files

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", sorted(files()))
def test_the_files_are_what_the_description_makes(name: str) -> None:
    stored = (ROOT / "k8s" / name).read_text()
    assert stored == files()[name], "run python -m dsde.telemetry.monitoring k8s"


def test_prometheus_takes_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    checked = subprocess.run(
        [promtool, "check", "rules", "--lint=all", "--lint-fatal", ROOT / "k8s" / "alerts" / "dsde.yaml"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout


def test_titles_and_names_are_unique() -> None:
    assert len({panel.title for panel in PANELS}) == len(PANELS)
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
