"""Values of command-line options as text, checked: a ValueError is one line with the option, its value and what is
accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["check_directory", "check_file", "chosen", "counts", "number", "parts", "positive", "temperature", "whole"]

LONGEST_LOAD = 512


def parts(flag: str, text: str) -> list[str]:
    """Values separated by commas."""
    found = [part.strip() for part in text.split(",")]
    if "" in found:
        raise ValueError(f"{flag} {text!r} has an empty entry; accepted: values separated by single commas")
    return found


def chosen(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Distinct names out of `known`."""
    names = list(dict.fromkeys(parts(flag, text)))
    for name in names:
        if name not in known:
            raise ValueError(f"{flag} {name!r} is unknown; accepted: all, {', '.join(known)}, separated by commas")
    return names


def counts(flag: str, text: str) -> list[int]:
    """Batch sizes."""
    return [whole(flag, part, 1, LONGEST_LOAD) for part in parts(flag, text)]


def whole(flag: str, text: str, low: int, high: int) -> int:
    """A whole number from low to high."""
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise ValueError(f"{flag} {text!r} is not accepted: give a whole number from {low} to {high}")
    return int(text)


def temperature(text: str) -> float:
    """A sampling temperature."""
    value = number(text)
    if value is None or not 0 <= value <= 2:
        raise ValueError(f"--temperature {text!r} is not accepted: give numbers from 0 to 2, separated by commas")
    return value


def positive(flag: str, text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if value is None or not 0 < value < float("inf"):
        raise ValueError(f"{flag} {text!r} is not accepted: give a number above 0")
    return value


def number(text: str) -> float | None:
    """The number, None where the text is none."""
    try:
        return float(text)
    except ValueError:
        return None


def check_file(flag: str, file: Path | None) -> None:
    """A file that can be written, or None."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ValueError(f"{flag} {file}: accepted: a file in a directory that exists")


def check_directory(flag: str, directory: Path | None) -> None:
    """A directory that is there or can be made, or None."""
    if directory is not None and directory.exists() and not directory.is_dir():
        raise ValueError(f"{flag} {directory} is a file; accepted: a directory, made where it does not exist")
