from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from dsde.access.keys import find, read_keys
from dsde.cli import main


def keys(*arguments: str, file: Path) -> int:
    return main(["keys", *arguments, "--file", str(file)])


def test_a_key_is_made_listed_and_revoked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys("add", "alice", file=file) == 0
    sent = capsys.readouterr().out.strip()
    assert keys("add", "batch", "--tokens-per-minute", "60000", "--expires", "2099-06-30", file=file) == 0
    other = capsys.readouterr().out.strip()
    alice, batch = read_keys(file)
    assert find({alice.id: alice}, sent, datetime.now(UTC)) == alice
    assert (batch.name, batch.tokens_per_minute, batch.expires) == ("batch", 60000, datetime(2099, 6, 30, tzinfo=UTC))

    assert keys("list", file=file) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == [alice.id, "alice"]
    assert second.split()[-4:] == ["2099-06-30", "server's", "60000", "server's"]
    assert sent not in first + second

    assert keys("revoke", alice.id, file=file) == 0
    assert read_keys(file) == (batch,)
    # The key itself names its id.
    assert keys("revoke", other, file=file) == 0
    assert read_keys(file) == ()
    assert other not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["add", "a b"], "dsde: name = 'a b': accepted: 1 to 64 printable"),
        (["add", "a", "--concurrency", "0"], "dsde: --concurrency 0: accepted: an integer from 1"),
        (["add", "a", "--requests-per-minute", "1e3"], "dsde: --requests-per-minute 1e3: accepted: an integer from 1"),
        (["add", "a", "--expires", "soon"], "dsde: --expires soon: accepted: a date to come, as in 2027-06-30"),
        (["add", "a", "--expires", "2020-01-01"], "dsde: --expires 2020-01-01: accepted: a date to come"),
        (["list"], "does not exist; `dsde keys add NAME --file"),
        (["revoke", "0123456789ab"], "does not exist; `dsde keys add NAME --file"),
    ],
)
def test_a_bad_option_is_one_line(
    file: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(*arguments, file=file) == 2
    assert not file.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_key_that_is_not_there_is_not_revoked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys("add", "alice", file=file)
    (alice,) = read_keys(file)
    capsys.readouterr()
    assert keys("revoke", "0123456789ab", file=file) == 2
    assert capsys.readouterr().err == f"dsde: {file} has no key 0123456789ab; it has: {alice.id}\n"
    assert read_keys(file) == (alice,)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys("add", "alice", file=tmp_path / "nowhere" / "keys.json") == 2
    assert "nowhere/keys.json: its folder does not exist" in capsys.readouterr().err
