from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from dsde.bench.cell import Scene
from dsde.bench.options import Options, options
from dsde.bench.workload import workload_names
from dsde.cli import main

FLAGS = (
    *("batch", "load", "temperature", "draft", "workload", "policies", "rounds", "tokens", "minutes"),
    *("json", "plot", "record"),
)


def given(**chosen: object) -> Options:
    unset = dict.fromkeys((*FLAGS, "target", "high", "low"))
    return options(argparse.Namespace(**{**unset, "quick": False, "cold": False, **chosen}))


def test_quick_is_three_batches_of_the_mix() -> None:
    chosen = given(quick=True)
    assert [scene.load for scene in chosen.plan.scenes] == [(1,), (8,), (24,)]
    assert {(scene.temperature, scene.workload) for scene in chosen.plan.scenes} == {(0.0, "mix")}
    assert chosen.models == {"high": None, "low": None}
    assert chosen.plan.seconds == 720.0


def test_everything_is_180_cells() -> None:
    chosen = given()
    assert len(chosen.plan.scenes) * len(chosen.models) == 180
    assert {scene.workload for scene in chosen.plan.scenes} == set(workload_names())
    assert chosen.plan.seconds == math.inf


def test_a_load_is_one_scene_with_its_order_kept() -> None:
    chosen = given(load="1,4,16,4,1", temperature="0", workload="code", minutes="5")
    assert chosen.plan.scenes == [Scene((1, 4, 16, 4, 1), 0.0, "code")]
    assert chosen.plan.seconds == 300.0


def test_own_models_name_their_drafts() -> None:
    assert given(target="a/t", low="a/d").models == {"low": ("a/t", "a/d")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,x"], "--batch 'x' is not accepted: give a whole number from 1 to 512"),
        (["--batch", "0"], "--batch '0' is not accepted: give a whole number from 1 to 512"),
        (["--batch", "1,,2"], "--batch '1,,2' has an empty entry; accepted: values separated by single commas"),
        (["--batch", "1", "--load", "1,4"], "--load 1,4 and --batch 1 exclude each other: give one of them"),
        (
            ["--temperature", "hot"],
            "--temperature 'hot' is not accepted: give numbers from 0 to 2, separated by commas",
        ),
        (
            ["--temperature", "nan"],
            "--temperature 'nan' is not accepted: give numbers from 0 to 2, separated by commas",
        ),
        (["--draft", "mid"], "--draft 'mid' is unknown; accepted: high, low, separated by commas"),
        (["--minutes", "0"], "--minutes '0' is not accepted: give a number above 0"),
        (["--rounds", "-1"], "--rounds '-1' is not accepted: give a whole number from 1 to 1000"),
        (["--tokens", "3"], "--tokens '3' is not accepted: give a whole number from 4 to 512"),
        (["--policies", "static-99"], "--policies 'static-99': accepted: static-0 to static-10"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: accepted: a file in a directory that exists"),
        (
            ["--high", "a/b"],
            "--high a/b is half a pair; accepted: --target MODEL with --high MODEL, --low MODEL or both",
        ),
        (
            ["--target", "a/t", "--high", "a/b", "--draft", "low"],
            "--draft low: there is no --low MODEL for --target a/t",
        ),
    ],
)
def test_a_bad_option_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err == f"dsde: {message}\n"


def test_a_plot_into_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.touch()
    with pytest.raises(ValueError, match=r"taken is a file; accepted: a directory, made where it does not exist"):
        given(plot=file)


def test_an_unknown_workload_lists_the_classes() -> None:
    with pytest.raises(ValueError, match=r"--workload 'poems' is unknown; accepted: all, mix, abstract, chat"):
        given(workload="mix,poems")


def test_help_teaches_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("autoregressive", "static-K", "NAME:SETTING=VALUE", "--quick", "dsde bench --load 1,4,16,32,4,1"):
        assert word in text


def test_a_trace_is_of_one_pair(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a trace is of one pair; accepted: with --draft high or --draft low"):
        given(record=tmp_path / "trace.jsonl")
    assert given(record=tmp_path / "trace.jsonl", draft="low").models == {"low": None}
