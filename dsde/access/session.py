"""What `dsde keys` does: one change of the key file each, or a table of it."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from dsde.access.keys import Key, locked, new_key, read_keys, write_keys

__all__ = ["add", "revoke", "show"]


def add(
    file: Path,
    name: str,
    expires: str | None,
    requests_per_minute: str | None,
    tokens_per_minute: str | None,
    concurrency: str | None,
) -> int:
    """Make a key, and print it on stdout, the rest on stderr. Raises ValueError naming the option, OSError."""
    now = datetime.now(UTC)
    key, sent = new_key(
        name,
        now,
        expires=_later(expires, now),
        requests_per_minute=_count("--requests-per-minute", requests_per_minute),
        tokens_per_minute=_count("--tokens-per-minute", tokens_per_minute),
        concurrency=_count("--concurrency", concurrency),
    )
    with locked(file):
        kept = read_keys(file) if file.exists() else ()
        write_keys(file, [*kept, key])
    print(f"key {key.id} of {key.name} is in {file}; this is shown once:", file=sys.stderr)
    print(sent)
    return 0


def revoke(file: Path, identifier: str) -> int:
    """Take a key out of the file. Raises ValueError for one that is not there, OSError."""
    if identifier.startswith("dsde_"):
        identifier = identifier.split("_")[1]
    with locked(file):
        kept = read_keys(file)
        rest = [key for key in kept if key.id != identifier]
        if len(rest) == len(kept):
            known = ", ".join(key.id for key in kept[:20]) or "none"
            raise ValueError(f"{file} has no key {identifier[:64]}; it has: {known}")
        write_keys(file, rest)
    print(f"key {identifier} is revoked; servers that follow {file} refuse it within a second")
    return 0


def show(file: Path) -> int:
    """Print a line for each key. Raises FileNotFoundError, ValueError."""
    now = datetime.now(UTC)
    rows: list[tuple[str, ...]] = [("ID", "NAME", "CREATED", "EXPIRES", "REQUESTS/MIN", "TOKENS/MIN", "CONCURRENCY")]
    rows += [_row(key, now) for key in read_keys(file)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(key: Key, now: datetime) -> tuple[str, ...]:
    limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
    expires = "never" if key.expires is None else _day(key.expires) + (" (expired)" if key.expired(now) else "")
    return (key.id, key.name, _day(key.created), expires, *("server's" if one is None else str(one) for one in limits))


def _day(when: datetime) -> str:
    return when.strftime("%Y-%m-%d" if (when.hour, when.minute) == (0, 0) else "%Y-%m-%d %H:%M")


def _later(text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    accepted = "accepted: a date to come, as in 2027-06-30 or 2027-06-30T12:00Z"
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"--expires {text}: {accepted}") from None
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    if when <= now:
        raise ValueError(f"--expires {text}: {accepted}")
    return when


def _count(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{option} {text}: accepted: an integer from 1")
    return int(text)
