"""`dsde chaos` against processes that stand for an application's."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dsde.chaos.processes import Application
from dsde.chaos.session import run
from dsde.cli import main

# A parent called `dsde serve` that keeps replicas, each with an engine, as Ray and vLLM do; the third one still starts.
SERVE = """
import subprocess, sys, time
child = "import subprocess, sys, time\\np = None\\nwhile True:\\n" \\
    "    p = p if p and p.poll() is None else subprocess.Popen(" \\
    "[sys.executable, '-c', 'import time; time.sleep(600)', 'Engine' + 'Core'])\\n    time.sleep(0.02)"
replicas = ["EngineReplica-a", "EngineReplica-b", "EngineReplica.initialize_and_get_metadata"]
codes = {**dict.fromkeys(replicas, child), "OpenAIIngress": "import time; time.sleep(600)"}
children = {}
while True:
    for name, code in codes.items():
        if name not in children or children[name].poll() is not None:
            children[name] = subprocess.Popen([sys.executable, "-c", code, name])
    time.sleep(0.02)
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], Application]]:
    script = tmp_path / "dsde"
    script.write_text(SERVE)
    process = subprocess.Popen([sys.executable, str(script), "serve"])
    # For a moment a process that has just been started has no command line.
    while not psutil.Process(process.pid).cmdline():
        time.sleep(0.01)
    application = Application(process.pid)

    def whole() -> Application:
        deadline = time.monotonic() + 20
        while len(application.engines()) < 2 or not application.candidates("ingress"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return application

    yield whole
    left = [*psutil.Process(process.pid).children(recursive=True)]
    for one in (process, *left):
        one.kill()
    process.wait()


def test_faults_hit_and_are_reported(
    serve: Callable[[], Application], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    application = serve()
    before = application.engines()
    report = tmp_path / "chaos.json"
    options = ["--every", "0.5", "--minutes", "0.02", "--faults", "engine", "--seed", "3", "--json", str(report)]
    assert main(["chaos", "--pid", str(application.pid), *options]) == 0
    told = json.loads(report.read_text())
    assert (told["seed"], len(told["faults"])) == (3, 2)
    first = told["faults"][0]
    assert first["pid"] in before
    assert first["recovered_s"] > 0
    assert not psutil.pid_exists(first["pid"])
    assert "2 faults, 0 left out; whole again" in capsys.readouterr().out
    before_mib, after_mib = told["memory_mib"]
    assert before_mib > 5
    assert abs(after_mib - before_mib) < 10


def test_memory_that_grows_fails(
    serve: Callable[[], Application], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    application = serve()
    sizes = iter([{1: 100 << 20, 2: 900 << 20}, {1: 321 << 20, 3: 5 << 20}])
    monkeypatch.setattr(Application, "memory", lambda self: next(sizes))
    assert run(application.pid, every_s=0.1, minutes=0.003, seed=0, kinds=["engine"], keep=2, json_file=None) == 1
    assert "100 MiB before the first, 321 MiB at the end: NOT flat" in capsys.readouterr().out


def test_a_fault_that_would_leave_too_few_engines_is_left_out(
    serve: Callable[[], Application], capsys: pytest.CaptureFixture[str]
) -> None:
    application = serve()
    before = application.engines()
    assert run(application.pid, every_s=0.1, minutes=0.003, seed=0, kinds=["engine"], keep=2, json_file=None) == 0
    assert application.engines() == before
    assert "0 faults, 1 left out" in capsys.readouterr().out


def test_a_stall_leaves_the_process_and_an_ingress_costs_no_engine(serve: Callable[[], Application]) -> None:
    application = serve()
    stalled, other = application.engines()
    application.hit("stall", stalled)
    deadline = time.monotonic() + 10
    while application.engines() != [other]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert psutil.Process(stalled).status() == psutil.STATUS_STOPPED
    (ingress,) = application.candidates("ingress")
    application.hit("ingress", ingress)
    while application.candidates("ingress") in ([], [ingress]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--pid", "1"], "--pid 1: that is no `dsde serve`; accepted: the process id of one"),
        (["--faults", "flood"], "--faults flood: accepted: engine, replica, stall, ingress"),
        (["--every", "0"], "--every 0 --minutes 20: accepted: numbers above 0"),
    ],
)
def test_a_bad_option_is_one_clear_line(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *options]) == 2
    assert capsys.readouterr().err == f"dsde: {told}\n"
