from __future__ import annotations

from pathlib import Path

import pytest

from dsde.access.keyring import Keyring
from dsde.access.keys import new_key, write_keys
from tests.unit.access.conftest import NOW, Clock


def test_a_change_of_the_file_holds_within_a_second(file: Path, clock: Clock) -> None:
    (alice, alice_sent), (bob, bob_sent) = new_key("alice", NOW), new_key("bob", NOW)
    write_keys(file, [alice])
    ring = Keyring(file, clock)
    assert (ring.find(alice_sent), ring.find(bob_sent)) == (alice, None)
    write_keys(file, [bob])
    clock.now += 0.5
    assert ring.find(alice_sent) == alice
    clock.now += 0.5
    assert (ring.find(alice_sent), ring.find(bob_sent)) == (None, bob)


def test_a_file_that_is_linked_anew_is_followed(tmp_path: Path, file: Path, clock: Clock) -> None:
    # As Kubernetes updates a mounted Secret.
    (alice, alice_sent), (bob, bob_sent) = new_key("alice", NOW), new_key("bob", NOW)
    for name, key in (("first", alice), ("second", bob)):
        (tmp_path / name).mkdir()
        write_keys(tmp_path / name / "keys.json", [key])
    (tmp_path / "data").symlink_to("first")
    file.symlink_to("data/keys.json")
    ring = Keyring(file, clock)
    (tmp_path / "new").symlink_to("second")
    (tmp_path / "new").replace(tmp_path / "data")
    clock.now += 1.0
    assert (ring.find(alice_sent), ring.find(bob_sent)) == (None, bob)


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_file_that_turns_bad_leaves_the_keys_and_says_so(
    file: Path, clock: Clock, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    key, sent = new_key("alice", NOW)
    write_keys(file, [key])
    ring = Keyring(file, clock)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    for _ in range(3):
        clock.now += 1.0
        assert ring.find(sent) == key
    # Once, not at every look.
    assert caplog.text.count("API keys stay as they were") == 1
    write_keys(file, [])
    clock.now += 1.0
    assert ring.find(sent) is None


def test_a_bad_file_at_the_start_is_refused(file: Path) -> None:
    file.write_text("{")
    with pytest.raises(ValueError, match="key file"):
        Keyring(file)
