"""API keys: what a file of them holds, how one is made, and how the one that a client sends is found.

A key reads `dsde_ID_SECRET`. The file has the id and the SHA-256 of the whole, never the key. Of a secret of 256 random
bits nobody can guess the hash's origin, so a slow hash, made for passwords, would cost time and add nothing.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

__all__ = ["Key", "find", "locked", "new_key", "read_keys", "write_keys"]

_MAX_KEYS = 10_000
_MAX_FILE_BYTES = 8 * 2**20
_SENT = re.compile(r"dsde_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_NO_HASH = "0" * 64


def _name(name: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]{1,64}", name):
        raise ValueError("accepted: 1 to 64 printable ASCII characters, none of them a space")
    return name


class Key(BaseModel):
    """One key as the file has it.

    id: the part of it that may be shown. name: whose it is. sha256: of the whole key, in hexadecimal. expires: from
    then on it is refused. requests_per_minute, tokens_per_minute (prompt and answer), concurrency (requests at a time):
    what it may use; None: as the server's settings say.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
    name: Annotated[str, AfterValidator(_name)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrency: int | None = Field(None, ge=1)

    def expired(self, now: datetime) -> bool:
        """Whether it is refused at `now`, an aware time."""
        return self.expires is not None and self.expires <= now


def _told(message: str) -> str:
    return message.removeprefix("Value error, ")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[Key, ...] = Field((), max_length=_MAX_KEYS)

    @model_validator(mode="after")
    def _ids_differ(self) -> _File:
        if len({key.id for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have one id")
        return self


def new_key(
    name: str,
    now: datetime,
    *,
    expires: datetime | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    concurrency: int | None = None,
) -> tuple[Key, str]:
    """(what the file keeps, what the client sends). Raises ValueError naming the field and what is accepted."""
    identifier = secrets.token_hex(6)
    sent = f"dsde_{identifier}_{secrets.token_urlsafe(32)}"
    try:
        key = Key(
            id=identifier,
            name=name,
            sha256=sha256(sent.encode()).hexdigest(),
            created=now,
            expires=expires,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrency=concurrency,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{first['loc'][0]} = {first['input']!r}: {_told(first['msg'])}") from None
    return key, sent


def find(keys: dict[str, Key], sent: str, now: datetime) -> Key | None:
    """The key of `keys`, by their ids, that a client has `sent`; None for one that is unknown or has expired.

    An id is no secret, and finding it may show in time; the comparison that counts takes as long for every key.
    """
    form = _SENT.fullmatch(sent)
    key = keys.get(form[1]) if form else None
    digest = sha256(sent.encode(errors="surrogatepass")).hexdigest()
    same = hmac.compare_digest(digest, key.sha256 if key else _NO_HASH)
    return key if key is not None and same and not key.expired(now) else None


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in a file. Raises FileNotFoundError, and ValueError naming the field and what is accepted."""
    if not path.is_file():
        raise FileNotFoundError(f"key file {path} does not exist; `dsde keys add NAME --file {path}` makes it")
    with path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES + 1)
    if len(text) > _MAX_FILE_BYTES:
        raise ValueError(f"key file {path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        return _File.model_validate_json(text).keys
    except ValidationError as error:
        # What stands in the file stays there: somebody may have put a key where its hash belongs.
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"key file {path}: {where + ': ' if where else ''}{_told(first['msg'])}") from None


def write_keys(path: Path, keys: Sequence[Key]) -> None:
    """Put `keys` in the place of the file's, at once, readable for its owner alone. Raises OSError."""
    kept = [key.model_dump(mode="json", exclude_none=True) for key in keys]
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(json.dumps({"keys": kept}, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other writers of the file out for the time of the block. Raises FileNotFoundError without its folder."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"key file {path}: its folder does not exist")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
