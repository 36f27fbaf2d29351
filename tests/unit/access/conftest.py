from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

NOW = datetime(2026, 11, 30, tzinfo=UTC)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"
