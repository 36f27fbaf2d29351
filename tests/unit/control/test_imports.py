"""The control layer is pure: a scheduler, or a replay on a laptop, needs no tensor library for it."""

import subprocess
import sys


def test_the_control_layer_needs_no_tensor_library() -> None:
    script = (
        "import sys, dsde.control.controller, dsde.control.replay;"
        "print(sorted({'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
