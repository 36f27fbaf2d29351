from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsde.cli import main
from dsde.engine import plugin
from dsde.models import check, prepare


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DSDE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DSDE_MODELS_DIR", str(tmp_path))


@pytest.fixture
def any_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "model_paths", lambda config: ("target", "draft"))
    monkeypatch.setattr(check, "check_models", lambda target, draft: None)
    monkeypatch.setattr(check, "check_memory", lambda config, target, draft: None)


def test_help_needs_nothing_heavy() -> None:
    program = (
        "import sys; from dsde.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'ray', 'transformers', 'pydantic'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"
    assert "engine-args" in answer.stdout


@pytest.mark.parametrize(
    "command",
    [["serve"], ["keys"], ["keys", "add"], ["client"], ["engine-args"], ["replay"], ["models", "prepare"]],
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert f"usage: dsde {' '.join(command)}" in capsys.readouterr().out


def test_engine_args_is_one_json_object_and_nothing_else(
    any_models: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chatty(config: Any) -> dict[str, Any]:
        print("a library talks")
        return {"policy": config.speculation.policy, "extra": config.engine.extra}

    monkeypatch.setattr(plugin, "engine_arguments", chatty)
    assert main(["engine-args", "--pair", "bench", "--policy", "static", "--set", "engine.extra.seed=1"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"policy": "static", "extra": {"seed": 1}}
    assert captured.err == "a library talks\n"


def test_engine_args_can_be_a_command_line(
    any_models: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin, "serve_command", lambda config: f"vllm serve --dtype {config.model.dtype}")
    assert main(["engine-args", "--cli", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == "vllm serve --dtype float32\n"


def test_serve_passes_its_options_on(any_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setitem(sys.modules, "deployments.serve", SimpleNamespace(run=served.append))
    options = ["--replicas", "3", "--port", "0", "--device", "gpu", "--target", "a/b", "--draft", "a/c", "--open"]
    assert main(["serve", *options]) == 0
    [config] = served
    assert (config.serving.replicas, config.serving.port, config.serving.device) == (3, 0, "gpu")
    assert (config.model.target, config.model.draft) == ("a/b", "a/c")
    assert config.access.open


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "--port", "http"],
            "dsde: serving.port = 'http' is not accepted; it should be a valid integer, unable to parse string as an "
            "integer",
        ),
        (
            ["serve", "--open", "--host", "0.0.0.0"],
            "dsde: access.open = true with serving.host = 0.0.0.0: accepted without keys: 127.0.0.1, ::1 or localhost",
        ),
        (["serve", "--target", "a/b"], "dsde: model.draft is missing: model.target and model.draft go together"),
        (
            ["client", "hello", "--address", "127.0.0.1:9000"],
            "dsde: --address 127.0.0.1:9000: that is the server's place for gRPC, which --grpc chooses",
        ),
        (
            ["client", "hello", "--grpc", "--url", "http://a"],
            "dsde: --url http://a: that is the server's place for HTTP",
        ),
        (["serve", "--config", "nowhere.yaml"], "dsde: configuration file nowhere.yaml does not exist"),
        (
            ["engine-args", "--set", "max_length=3"],
            "dsde: --set max_length=3: accepted: SECTION.SETTING=VALUE, as in speculation.max_length=4",
        ),
        (
            ["engine-args", "--set", "speculation.length=3"],
            "dsde: speculation.length is not a setting; accepted here: policy, settings, max_length",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == f"{message}\n"
    assert captured.out == ""


def test_an_unprepared_pair_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine-args", "--pair", "bench-low"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("dsde: model.pair = 'bench-low' is not ready: ")
    assert captured.err.endswith("Run `dsde models prepare bench`\n")


def test_a_defect_keeps_its_traceback(any_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "engine_arguments", lambda config: int("a defect"))
    with pytest.raises(ValueError, match="a defect"):
        main(["engine-args"])


def test_prepare_reports_and_verifies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, bool]] = []

    def fake(name: str, progress: Any, *, verify: bool) -> Path:
        calls.append((name, verify))
        progress("[1/1] a step")
        return Path("models")

    monkeypatch.setattr(prepare, "prepare", fake)
    assert main(["models", "prepare", "all", "--verify"]) == 0
    assert calls == [("all", True)]
    assert capsys.readouterr().out == "[1/1] a step\nmodels all: ready in models\n"


def test_list_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        [name, "not", "prepared"] for name in ("embedded", "bench", "bench-low")
    ]
