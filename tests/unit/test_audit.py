from __future__ import annotations

import runpy
from datetime import date
from pathlib import Path
from typing import Any

import pytest

LOCKS = Path(__file__).parents[2] / "locks"
AUDIT = runpy.run_path(str(LOCKS / "audit.py"))
judge = AUDIT["judge"]
TODAY = date(2026, 11, 30)
SOUND = {"name": "numpy", "version": "2.3", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "not found"}
FOUND = {
    "name": "idna",
    "version": "3.1",
    "vulns": [{"id": "PYSEC-2024-60", "aliases": ["CVE-2024-3651"], "fix_versions": ["3.7"], "description": "slow"}],
}


def entry(**changed: Any) -> dict[str, Any]:
    return {"id": "CVE-2024-3651", "package": "idna", "until": date(2027, 1, 1), "why": "no name is encoded"} | changed


def test_a_vulnerability_that_is_not_listed_is_a_finding() -> None:
    told, well = judge([SOUND, FOUND], [], TODAY)
    assert not well
    assert told == ["idna 3.1: PYSEC-2024-60 CVE-2024-3651, fixed in 3.7", "2 of 2 packages audited, 1 finding(s)"]


@pytest.mark.parametrize("name", ["PYSEC-2024-60", "CVE-2024-3651"])
def test_a_listed_one_is_none_under_any_of_its_names(name: str) -> None:
    told, well = judge([SOUND, FOUND, UNKNOWN], [entry(id=name)], TODAY)
    assert well
    assert told == ["2 of 3 packages audited, 0 finding(s); unknown to the advisory service: torch"]


@pytest.mark.parametrize(
    ("changed", "finding"),
    [({"package": "numpy"}, "idna 3.1"), ({"id": "CVE-2024-3652"}, "idna 3.1"), ({"until": TODAY}, "judge it anew")],
)
def test_an_entry_holds_for_its_package_and_its_time(changed: dict[str, Any], finding: str) -> None:
    told, well = judge([FOUND], [entry(**changed)], TODAY)
    assert not well
    assert finding in told[0]


@pytest.mark.parametrize("changed", [{"why": None}, {"until": "2027-01-01"}, {"severity": "low"}])
def test_an_entry_says_until_when_and_why(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="accepted are id, package, until, why"):
        judge([FOUND], [entry(**changed)], TODAY)


def test_no_answer_is_said_and_is_no_finding() -> None:
    told, well = judge([UNKNOWN], [], TODAY)
    assert well
    assert told == ["NOT AUDITED: the advisory service knows none of 1 packages, or does not answer"]


def test_the_pins_are_asked_for_as_pypi_knows_them() -> None:
    asked = AUDIT["requirements"]([LOCKS / "cpu.lock.txt", LOCKS / "dev.lock.txt"])
    assert len(asked) == len(set(asked)) > 200
    assert not [line for line in asked if "+" in line or line.count("==") != 1 or "===" in line]
    assert [line for line in asked if line.startswith(("torch==", "pytest=="))]


def test_the_list_can_be_read() -> None:
    import tomllib

    listed = tomllib.loads((LOCKS / "advisories.toml").read_text()).get("advisory", [])
    judge([SOUND], listed, date(1970, 1, 1))
