"""The options of `dsde replay`, checked, with the traces read: what is replayed, at which costs, how long."""

from __future__ import annotations

import argparse
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsde.bench.cell import Scene
from dsde.bench.contender import LONGEST, SCHEDULE, Contender, contenders
from dsde.bench.parse import check_directory, check_file, chosen, counts, number, parts, temperature, whole
from dsde.bench.workload import MIX
from dsde.control.policies import build_policy
from dsde.control.replay import COSTS, StepCosts
from dsde.control.trace import Trace

__all__ = ["ReplayOptions", "Work", "only", "replay_options"]

POLICIES = ("static", "goodput", "adaedl", "paper", "reference")
BATCH = "1,4,8,16,32"
STEPS = 150
MOST_TOKENS = 1500
SIGNAL_LENGTH = 4
"""As in `dsde bench`, so that both tell of the same signals."""
NO_SIGNALS = ("policies", "batch", "load", "workload", "cost", "sync", "noise", "steps", "tokens", "warmup")
"""Options of replayed policies, which have no part in --signals."""


@dataclass(frozen=True, slots=True)
class Work:
    """How many tokens a stage decodes; every policy decodes as many. At most one is given.

    steps: as many as that number of plain steps. tokens: exactly these.
    """

    steps: int | None = None
    tokens: int | None = None

    def of(self, batch: int, trace: Trace) -> int:
        """Tokens of a stage; by default 150 plain steps, or one pass over the trace, up to 1500 tokens, if more."""
        if self.tokens is not None:
            return self.tokens
        if self.steps is not None:
            return self.steps * batch
        once = sum(one.accepted + 1 for request in trace.requests for one in request.rounds)
        return max(STEPS * batch, min(once, MOST_TOKENS))


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """traces, costs: by the names the result calls them. scenes: of every trace and cost model. warmup: steps.

    held_out: tune on one half of the requests, report on the other. signal_length: None to replay policies, else the
    fixed length at which signals are held against acceptance, in draft tokens.
    """

    traces: Mapping[str, Trace]
    costs: Mapping[str, StepCosts]
    scenes: Sequence[Scene]
    contenders: Sequence[Contender]
    work: Work
    warmup: int
    seed: int
    trims: bool
    held_out: bool
    oracle: bool
    signal_length: int | None
    json: Path | None
    plot: Path | None

    @property
    def length(self) -> int:
        """Longest speculation length of every contender, in draft tokens."""
        return _longest(self.traces)


def replay_options(given: argparse.Namespace) -> ReplayOptions:
    """Check the command line's text and read the traces. ValueError with one line: the option, its value, what is
    accepted.
    """
    for one, other in (("load", "batch"), ("steps", "tokens")):
        if getattr(given, one) is not None and getattr(given, other) is not None:
            raise ValueError(
                f"--{one} {getattr(given, one)} and --{other} {getattr(given, other)} exclude each other: "
                "give one of them"
            )
    if given.held_out and given.warmup is not None:
        raise ValueError(f"--warmup {given.warmup} and --held-out exclude each other: the tuning half is the warm-up")
    if given.signals:
        for name in NO_SIGNALS:
            if getattr(given, name) is not None:
                raise ValueError(f"--{name} has no part in --signals, which replays no policy: leave one of them out")
    elif given.signal_length is not None:
        raise ValueError(f"--signal-length {given.signal_length} goes with --signals")
    check_file("--json", given.json)
    check_directory("--plot", given.plot)
    costs = dict(_costs(given.cost or ["cpu"], given.sync, given.noise))
    traces = _traces(given.file)
    length = _longest(traces)
    loads: list[tuple[int, ...]] = [(batch,) for batch in dict.fromkeys(counts("--batch", given.batch or BATCH))]
    if given.load is not None:
        loads = [tuple(counts("--load", given.load))]
    scenes = [Scene(*one) for one in itertools.product(loads, _temperatures(given, traces), _workloads(given, traces))]
    _check_halves(given.held_out or given.signals, scenes, traces)
    return ReplayOptions(
        traces=traces,
        costs=costs,
        scenes=scenes,
        contenders=_contenders(POLICIES if given.policies is None else parts("--policies", given.policies), length),
        work=Work(
            None if given.steps is None else whole("--steps", given.steps, 1, 1_000_000),
            None if given.tokens is None else whole("--tokens", given.tokens, 1, 100_000_000),
        ),
        warmup=whole("--warmup", given.warmup or "0", 0, 1_000_000),
        seed=whole("--seed", given.seed or "0", 0, 2**31),
        trims=not given.no_trim,
        held_out=given.held_out,
        oracle=not given.no_oracle,
        signal_length=_signal_length(given, length),
        json=given.json,
        plot=given.plot,
    )


def only(trace: Trace, scene: Scene) -> Trace:
    """The requests of the scene's temperature and workload."""
    return trace.only(
        index
        for index, one in enumerate(trace.requests)
        if one.temperature == scene.temperature and scene.workload in (MIX, one.workload)
    )


def _signal_length(given: argparse.Namespace, length: int) -> int | None:
    if given.signals:
        return whole("--signal-length", given.signal_length or str(min(SIGNAL_LENGTH, length)), 1, length)
    return None


def _traces(text: str) -> dict[str, Trace]:
    files = [Path(part) for part in dict.fromkeys(parts("FILE", text))]
    names = [file.name.removesuffix(".gz").removesuffix(".jsonl") for file in files]
    alike = {name for name in names if names.count(name) > 1}
    return {str(file) if name in alike else name: _read(file) for file, name in zip(files, names, strict=True)}


def _read(file: Path) -> Trace:
    try:
        trace = Trace.read(file)
    except FileNotFoundError as error:
        raise ValueError(f"{file} does not exist; accepted: a trace of `dsde bench --record`") from error
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file} is no trace of `dsde bench --record` that can be read: {what:.160}") from error
    kept = trace.only(index for index, request in enumerate(trace.requests) if request.rounds)
    if not kept.requests:
        raise ValueError(f"{file} holds no request with a recorded drafting; record one with `dsde bench --record`")
    return kept


def _temperatures(given: argparse.Namespace, traces: Mapping[str, Trace]) -> list[float]:
    recorded = {name: sorted({one.temperature for one in trace.requests}) for name, trace in traces.items()}
    if given.temperature is None:
        return sorted(set.intersection(*map(set, recorded.values()))) or _nothing_common("temperature", recorded)
    wanted = list(dict.fromkeys(temperature(part) for part in parts("--temperature", given.temperature)))
    for value in wanted:
        for name, known in recorded.items():
            if value not in known:
                there = ", ".join(f"{one:g}" for one in known)
                raise ValueError(f"--temperature {value:g} is not recorded in trace {name}; accepted: {there}")
    return wanted


def _workloads(given: argparse.Namespace, traces: Mapping[str, Trace]) -> list[str]:
    common = sorted(set.intersection(*({one.workload for one in trace.requests} for trace in traces.values())))
    known = (MIX, *(name for name in common if name != MIX))
    text = given.workload or MIX
    return list(known) if text == "all" else chosen("--workload", text, known)


def _nothing_common(what: str, recorded: Mapping[str, Sequence[float]]) -> list[float]:
    there = "; ".join(f"{name}: {', '.join(f'{one:g}' for one in known)}" for name, known in recorded.items())
    raise ValueError(f"the traces have no {what} in common ({there}): replay them one by one")


def _check_halves(wanted: bool, scenes: Sequence[Scene], traces: Mapping[str, Trace]) -> None:
    for scene, (name, trace) in itertools.product(scenes, traces.items()):
        found = len(only(trace, scene).requests)
        if found < (2 if wanted else 1):
            where = f"trace {name}, temperature {scene.temperature:g}, workload {scene.workload}"
            need = "two, to tune on one half and report on the other" if wanted else "one"
            raise ValueError(f"{where} has {found} requests; at least {need}")


def _longest(traces: Mapping[str, Trace]) -> int:
    return min(LONGEST, *(trace.length for trace in traces.values()))


def _contenders(names: Sequence[str], length: int) -> list[Contender]:
    """The contenders that a draft of `length` tokens allows; `static` stands for the fixed lengths up to it."""
    labels: list[str] = []
    for name in names:
        for one in contenders([name])[1:]:
            if name == "static" and one.length is not None and one.length > length:
                continue
            if one.policy is not None and (one.policy != SCHEDULE or one.settings):
                try:
                    build_policy(one.policy, one.settings, length)
                except ValueError as error:
                    raise ValueError(
                        f"--policies {name!r} with drafts of {length} tokens in the trace: {error}"
                    ) from error
            labels.append(one.label)
    return contenders(labels)


def _costs(texts: Sequence[str], sync: str | None, noise: str | None) -> Iterator[tuple[str, StepCosts]]:
    changes = {
        name: _not_negative(f"--{name}", text) for name, text in (("sync", sync), ("noise", noise)) if text is not None
    }
    for text in dict.fromkeys(part.strip() for given in texts for part in given.split(";")):
        yield text, replace(_cost(text), **changes)


def _cost(text: str) -> StepCosts:
    if text in COSTS:
        return COSTS[text]
    values = [number(part) for part in text.split(",")]
    real = [value for value in values if value is not None and 0 <= value < float("inf")]
    if len(real) != len(values) or len(real) not in (3, 4) or real[0] + real[1] == 0:
        raise ValueError(
            f"--cost {text!r} is not accepted: give {', '.join(COSTS)} or BASE,TOKEN,DRAFT[,DRAFT_PER_REQUEST] in ms, "
            "several separated by semicolons"
        )
    return StepCosts(*real)


def _not_negative(flag: str, text: str) -> float:
    value = number(text)
    if value is None or not 0 <= value < float("inf"):
        raise ValueError(f"{flag} {text!r} is not accepted: give a number from 0 up")
    return value
