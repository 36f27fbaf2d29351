from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsde.config import load


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DSDE_") and "__" in name:
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "dsde.yaml"
    path.write_text("speculation: {policy: static, settings: {length: 3}, max_length: 5}\nserving: {port: 8100}\n")
    return path


def test_defaults_stand_alone() -> None:
    config = load()
    assert (config.model.pair, config.serving.replicas, config.serving.port) == ("embedded", 2, 8000)


def test_command_line_beats_environment_beats_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(file).speculation.max_length == 5
    monkeypatch.setenv("DSDE_SPECULATION__MAX_LENGTH", "6")
    config = load(file)
    assert (config.speculation.max_length, config.speculation.policy, config.serving.port) == (6, "static", 8100)
    config = load(file, {"speculation": {"max_length": "7"}})
    assert (config.speculation.max_length, config.speculation.settings, config.serving.port) == (7, {"length": 3}, 8100)


def test_another_policy_does_not_inherit_settings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(file, {"speculation": {"policy": "autoregressive"}})
    assert (config.speculation.settings, config.speculation.max_length) == ({}, 5)
    monkeypatch.setenv("DSDE_SPECULATION__POLICY", "static")
    monkeypatch.setenv("DSDE_SPECULATION__SETTINGS", '{"length": 2}')
    assert load(None, {"speculation": {"policy": "autoregressive"}}).speculation.settings == {}


def test_a_pair_replaces_models_named_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSDE_MODEL__TARGET", "a/large")
    monkeypatch.setenv("DSDE_MODEL__DRAFT", "a/small")
    assert load().model.target == "a/large"
    config = load(None, {"model": {"pair": "bench"}})
    assert (config.model.pair, config.model.target, config.model.draft) == ("bench", None, None)


def test_the_models_directory_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSDE_MODELS_DIR", "elsewhere")
    assert load().model.pair == "embedded"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"serving": {"port": 70000}},
            "serving.port = 70000 is not accepted; it should be less than or equal to 65535",
        ),
        (
            {"model": {"pair": "huge"}},
            "model.pair = 'huge' is not accepted; it should be 'embedded', 'bench' or 'bench-low'",
        ),
        (
            {"speculation": {"length": 3}},
            "speculation.length is not a setting; accepted here: policy, settings, max_length",
        ),
        (
            {"engines": {}},
            "engines is not a setting; accepted here: model, speculation, engine, serving, access, limits, telemetry",
        ),
        ({"model": {"target": "a/b"}}, "model.draft is missing: model.target and model.draft go together"),
    ],
)
def test_an_error_names_the_setting_the_value_and_what_is_accepted(
    overrides: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        load(None, overrides)
    assert str(error.value) == message


def test_every_error_has_its_line() -> None:
    with pytest.raises(ValueError, match=r"serving.replicas = 0 .*\nserving.port = -1 "):
        load(None, {"serving": {"replicas": 0, "port": -1}})


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match=r"speculation.policy 'guess' is unknown"):
        load(None, {"speculation": {"policy": "guess"}})


def test_a_mistyped_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSDE_SPECULATON__POLICY", "static")
    with pytest.raises(
        ValueError, match="DSDE_SPECULATON__POLICY: speculaton is no section; accepted: model, speculation"
    ):
        load()


def test_an_unreadable_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSDE_SPECULATION__SETTINGS", "length=3")
    with pytest.raises(ValueError, match=r'environment: .*"speculation"'):
        load()


@pytest.mark.parametrize(
    ("text", "message"), [("- static", "holds a list; accepted: sections"), ("a: [", "is not YAML")]
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "dsde.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.yaml does not exist"):
        load(tmp_path / "nowhere.yaml")
