"""Ask PyPI for known vulnerabilities of the locked packages: `make audit`. Those of advisories.toml do not apply.

Exits with 1 for a vulnerability that is not listed there or an entry whose day has come. An advisory service that does
not answer is no finding: that is said, and the exit is 0.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

__all__ = ["judge", "requirements"]

LOCKS = Path(__file__).parent
_COMMAND = [
    *(sys.executable, "-m", "pip_audit", "--vulnerability-service", "pypi", "--no-deps", "--disable-pip"),
    *("--format", "json", "--progress-spinner", "off"),
]
_FIELDS = {"id": str, "package": str, "until": date, "why": str}


def requirements(locks: Iterable[Path]) -> list[str]:
    """The pins of the locks as PyPI knows them: without the label of a local build."""
    lines = (line for lock in locks for line in lock.read_text().splitlines() if line and not line.startswith("#"))
    return sorted({re.sub(r"={2,3}([^+]+)(\+.*)?$", r"==\1", line) for line in lines})


def judge(
    dependencies: Sequence[dict[str, Any]], advisories: Sequence[dict[str, Any]], today: date
) -> tuple[list[str], bool]:
    """(what to print, whether all is well).

    dependencies: as in pip-audit's JSON report. Raises ValueError for a bad entry among the advisories.
    """
    for entry in advisories:
        if {name: type(value) for name, value in entry.items()} != _FIELDS:
            raise ValueError(f"advisories.toml: {entry}: accepted are {', '.join(_FIELDS)}, `until` as a date")
    checked = [one for one in dependencies if "vulns" in one]
    if not checked:
        return [
            f"NOT AUDITED: the advisory service knows none of {len(dependencies)} packages, or does not answer"
        ], True
    listed = {(entry["package"], entry["id"]) for entry in advisories}
    told = [
        f"advisories.toml: {entry['id']} of {entry['package']} was judged until {entry['until']}: judge it anew"
        for entry in advisories
        if entry["until"] <= today
    ]
    for one in checked:
        for found in one["vulns"]:
            names = [found["id"], *found["aliases"]]
            if not any((one["name"], name) in listed for name in names):
                fixed = ", ".join(found["fix_versions"]) or "no version yet"
                told.append(f"{one['name']} {one['version']}: {' '.join(names)}, fixed in {fixed}")
    summary = f"{len(checked)} of {len(dependencies)} packages audited, {len(told)} finding(s)"
    unknown = [one["name"] for one in dependencies if "vulns" not in one]
    if unknown:
        summary += f"; unknown to the advisory service: {', '.join(unknown)}"
    return [*told, summary], not told


def main() -> int:
    try:
        # Two runs: one package may have a version for each device.
        found = {json.dumps(one): one for names in (("cpu", "dev"), ("gpu",)) for one in _asked(names)}
    except ConnectionError as error:
        print(f"NOT AUDITED: {error}")
        return 0
    advisories = tomllib.loads((LOCKS / "advisories.toml").read_text()).get("advisory", [])
    told, well = judge(list(found.values()), advisories, date.today())
    print("\n".join(told))
    return 0 if well else 1


def _asked(names: Sequence[str]) -> list[dict[str, Any]]:
    """pip-audit's report on locks. Raises ConnectionError without an advisory service, ValueError for no report."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements(LOCKS / f"{name}.lock.txt" for name in names)))
        file.flush()
        made = subprocess.run([*_COMMAND, "-r", file.name], capture_output=True, text=True)
    last = (made.stderr.strip().splitlines() or ["no output"])[-1][:300]
    if "Could not connect" in made.stderr:
        raise ConnectionError(last)
    if not made.stdout:
        raise ValueError(f"pip-audit: {last}")
    report: list[dict[str, Any]] = json.loads(made.stdout)["dependencies"]
    return report


if __name__ == "__main__":
    sys.exit(main())
