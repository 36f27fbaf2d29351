from __future__ import annotations

import json
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dsde.access.keys import find, new_key, read_keys, write_keys
from tests.unit.access.conftest import NOW


def test_a_key_is_found_by_what_its_client_sends_and_by_nothing_else() -> None:
    key, sent = new_key("alice", NOW)
    other, other_sent = new_key("alice", NOW)
    keys = {one.id: one for one in (key, other)}
    assert find(keys, sent, NOW) == key
    assert find(keys, other_sent, NOW) == other
    # The id of one with the secret of the other.
    assert find(keys, f"dsde_{key.id}_{other_sent.split('_', 2)[2]}", NOW) is None
    for wrong in ("", sent[:-1], sent + "A", sent.upper(), f" {sent}", key.sha256, "dsde__", "\ud800", "x" * 10**6):
        assert find(keys, wrong, NOW) is None
    assert find({}, sent, NOW) is None


def test_a_key_has_256_random_bits_and_the_file_has_none_of_them(file: Path) -> None:
    key, sent = new_key("alice", NOW)
    secret = sent.removeprefix(f"dsde_{key.id}_")
    # 43 characters of 6 bits each.
    assert len(secret) == 43
    write_keys(file, [key])
    assert secret not in file.read_text()
    assert sent not in repr(key)
    assert len({new_key("alice", NOW)[1] for _ in range(100)}) == 100


def test_an_expired_key_is_refused_from_that_time_on() -> None:
    key, sent = new_key("alice", NOW, expires=NOW + timedelta(days=1))
    assert find({key.id: key}, sent, NOW + timedelta(days=1, seconds=-1)) == key
    assert find({key.id: key}, sent, NOW + timedelta(days=1)) is None


def test_what_is_written_is_read_again(file: Path) -> None:
    keys = [new_key("alice", NOW, tokens_per_minute=60, expires=NOW + timedelta(days=1))[0], new_key("bob", NOW)[0]]
    write_keys(file, keys)
    assert read_keys(file) == tuple(keys)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["keys.json"]


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a\n", "é"])
def test_a_name_that_would_break_a_table_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"name = .*: accepted: 1 to 64 printable ASCII characters"):
        new_key(name, NOW)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sha256": "dsde_0123_a-key-where-its-hash-belongs"}, "keys.0.sha256: String should match"),
        ({"concurrency": 0}, "keys.0.concurrency: Input should be greater than or equal to 1"),
        ({"expires": "2027-01-01T00:00"}, "keys.0.expires: Input should have timezone info"),
        ({"scope": "all"}, "keys.0.scope: Extra inputs are not permitted"),
        ({"id": None}, "keys.0.id: Input should be a valid string"),
    ],
)
def test_a_bad_file_is_told_by_its_field_and_shows_nothing_of_itself(
    file: Path, change: dict[str, Any], told: str
) -> None:
    good = new_key("alice", NOW)[0].model_dump(mode="json")
    file.write_text(json.dumps({"keys": [good | change]}))
    with pytest.raises(ValueError, match=told) as error:
        read_keys(file)
    assert str(file) in str(error.value)
    assert "a-key-where" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"keys": 1}', "\x00"])
def test_a_file_of_another_kind_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=f"key file {file}: "):
        read_keys(file)


def test_two_keys_of_one_id_are_refused(file: Path) -> None:
    key = new_key("alice", NOW)[0]
    write_keys(file, [key, key])
    with pytest.raises(ValueError, match="two keys have one id"):
        read_keys(file)


def test_a_missing_file_says_how_to_make_one(file: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`dsde keys add NAME --file .*keys.json` makes it"):
        read_keys(file)
