"""The generated code is what the .proto makes, and the messages have a place for every figure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from deployments.proto.dsde.v1 import inference_pb2 as pb
from dsde.control.records import RequestSpeculation

ROOT = Path(__file__).parents[3]
PROTO = Path("deployments/proto/dsde/v1/inference.proto")


def test_the_generated_code_is_up_to_date(tmp_path: Path) -> None:
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, str(PROTO)], cwd=ROOT, check=True)
    for name in ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py"):
        made, committed = tmp_path / PROTO.parent / name, ROOT / PROTO.parent / name
        assert made.read_text() == committed.read_text(), f"{committed} is stale: run `make proto`"


@pytest.mark.parametrize("measured", [0.25, None])
def test_every_figure_of_http_has_its_field(measured: float | None) -> None:
    figures = RequestSpeculation(
        policy="paper",
        steps=9,
        steps_off=1,
        length_mean=2.5,
        length_max=4,
        length_limit=8,
        kld_mean=measured,
        kld_last=measured,
        kld_max=measured,
        wvir_mean=measured,
        wvir_last=measured,
        stability=measured,
        expected_acceptance_rate=measured,
        capped_steps=3,
        straggler_wait_ms=1.5,
        straggler_caused_ms=2.5,
        straggler_steps=2,
    ).to_dict()
    message = ParseDict(figures, pb.Dsde())
    back = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    assert back == without_nulls(figures)


def without_nulls(tree: dict[str, object]) -> dict[str, object]:
    return {
        name: without_nulls(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if value is not None
    }
