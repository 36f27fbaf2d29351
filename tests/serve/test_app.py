"""The application's arguments, as `serve run` and a Serve configuration file give them; no cluster."""

from __future__ import annotations

import pytest

from deployments.app import configuration


def test_dotted_text_of_a_command_line_becomes_values() -> None:
    config = configuration(
        {
            "serving.replicas": "1",
            "speculation.policy": "static",
            "speculation.settings.length": "3",
            "model.dtype": "auto",
        }
    )
    assert (config.serving.replicas, config.speculation.settings, config.model.dtype) == (1, {"length": 3}, "auto")


def test_sections_of_a_file_are_taken_as_they_are() -> None:
    assert configuration({"speculation": {"policy": "reference", "max_length": 4}}).speculation.max_length == 4


def test_the_builder_s_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSDE_SPECULATION__SETTINGS", '{"length": 3}')
    assert configuration({"speculation": {"policy": "paper"}}).speculation.settings == {}


def test_a_wrong_argument_names_the_setting_and_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"serving\.replicas = 'many' is not accepted; it should be a valid integer"):
        configuration({"serving.replicas": "many"})
