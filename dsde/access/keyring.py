"""The keys of a running server, which follow their file: a key is made, changed or revoked without a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from dsde.access.keys import Key, find, read_keys

__all__ = ["Keyring"]

logger = logging.getLogger("ray.serve")

_LOOK_S = 1.0
"""Time between two looks at the file: a revoked key is refused that much later, at most."""


class Keyring:
    """The keys of the file at `path`. Raises, at the start only, FileNotFoundError and ValueError as read_keys() does.

    A file that is gone or bad later leaves the keys as they were, and an error in the log.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._seen = _stamp(path)
        self._looked = clock()
        self.keys = {key.id: key for key in read_keys(path)}

    def find(self, sent: str) -> Key | None:
        """The key that a client has sent; None for one that is unknown, revoked or expired."""
        self._follow()
        return find(self.keys, sent, datetime.now(UTC))

    def _follow(self) -> None:
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self.keys = {key.id: key for key in read_keys(self._path)}
        except (OSError, ValueError) as error:
            logger.error("API keys stay as they were: %s", error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes with the file, be it rewritten, replaced or, as Kubernetes does, linked anew."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
