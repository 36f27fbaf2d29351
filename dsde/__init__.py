"""dsde: LLM serving with per-request speculation lengths that follow the draft's measured stability."""

__version__ = "0.1.0"
