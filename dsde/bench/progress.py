"""What the benchmark says while it runs, on stderr: a bar on a terminal, a line per run elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

__all__ = ["Progress", "duration"]


def duration(seconds: float) -> str:
    """As one says it: 50 s, 7 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Progress:
    """Shows stages, then runs with the time that is left. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        text = "[progress.description]{task.description}"
        self._bar = Bar(
            TextColumn(text),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=None, left="")

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """Something without a known end has begun."""
        self._say(text, text)

    def ran(self, text: str, figure: str, done: int, total: int, left_s: float) -> None:
        """A run is over: what it was, what it measured, how many of how many are done, seconds left."""
        left = f"about {duration(left_s)} left"
        self._bar.update(self._task, completed=done, total=total, left=left)
        self._say(text, f"{text}: {figure} ({done} of {total}, {left})")

    def _say(self, description: str, line: str) -> None:
        self._bar.update(self._task, description=description)
        if not self._console.is_terminal:
            self._console.print(line, highlight=False, soft_wrap=True)
