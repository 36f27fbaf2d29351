"""The options of `dsde loadtest`, checked: what is sent, when, where to, and what becomes of the result."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsde.bench.parse import check_directory, number, parts, positive, whole
from loadtest.figures import Slo
from loadtest.plan import PROTOCOLS, Manner
from loadtest.profile import PROFILES, Profile
from loadtest.workload import Prompt, classes

__all__ = ["Options", "options"]

URL, ADDRESS = "http://127.0.0.1:8000", "127.0.0.1:9000"
TRACE = "trace"
LONGEST_ANSWER = 8192
# A short run on two cores: every class over both protocols, at most two minutes and a half.
QUICK = {"protocol": "mixed", "rate": "0.5", "duration": "60", "max_tokens": "24", "timeout": "90"}
FULL = {"protocol": "http", "rate": "1", "duration": "60", "max_tokens": None, "timeout": "300"}
PROBE = {**FULL, "duration": "30"}


@dataclass(frozen=True, slots=True)
class Options:
    """prompts, weights: the mix. profile: None where a trace's own times hold, duration_s its end."""

    prompts: Sequence[Prompt]
    weights: Mapping[str, float]
    profile: Profile | None
    duration_s: float
    protocols: Sequence[str]
    manner: Manner
    timeout_s: float
    url: str
    address: str
    api_key: str | None
    slo: Slo
    minutes: float
    rounds: int
    report: Path | None
    aiperf: Path | None
    find_rate: bool
    against: str | None
    about: Mapping[str, Any]


def options(given: argparse.Namespace) -> Options:
    """Check the command line's text. ValueError with one line: the option, its value, what is accepted."""
    _check_modes(given)
    defaults = QUICK if given.quick else PROBE if given.find_rate else FULL
    text = {name: getattr(given, name) if getattr(given, name) is not None else defaults[name] for name in defaults}
    if text["protocol"] not in PROTOCOLS:
        raise ValueError(f"--protocol {text['protocol']!r} is unknown; accepted: {', '.join(PROTOCOLS)}")
    duration_s = positive("--duration", str(text["duration"]))
    prompts, weights = _prompts(given)
    seed = whole("--seed", given.seed, 0, 2**31 - 1)
    manner = Manner(
        longest=None if text["max_tokens"] is None else whole("--max-tokens", text["max_tokens"], 1, LONGEST_ANSWER),
        temperature=_temperature(given.temperature),
        # With servers of our own it is the server's.
        policy=None if given.against is not None else given.policy,
        # Both sides of a comparison write equally many tokens.
        ignore_eos=given.against is not None,
        seed=seed,
    )
    profile = _profile(given, str(text["rate"]), duration_s, prompts)
    check_directory("--report", given.report)
    check_directory("--aiperf", given.aiperf)
    _check_against(given.against)
    return Options(
        prompts=prompts,
        weights=weights,
        profile=profile,
        duration_s=duration_s,
        protocols=PROTOCOLS[str(text["protocol"])],
        manner=manner,
        timeout_s=positive("--timeout", str(text["timeout"])),
        url=given.url or URL,
        address=given.address or ADDRESS,
        api_key=given.api_key or os.environ.get("DSDE_API_KEY"),
        slo=Slo(positive("--slo-ttft", given.slo_ttft), positive("--slo-tpot", given.slo_tpot)),
        minutes=positive("--minutes", given.minutes),
        rounds=whole("--rounds", given.rounds, 1, 100),
        report=given.report,
        aiperf=given.aiperf,
        find_rate=given.find_rate,
        against=given.against,
        about={
            "profile": TRACE if profile is None else profile.name,
            "rate": None if profile is None else profile.rate,
            "peak": None if profile is None or profile.peak == profile.rate else profile.peak,
            "seconds": duration_s,
            "protocol": text["protocol"],
            "mix": given.mix or "all",
            "input": None if given.input is None else str(given.input),
            "seed": seed,
            "policy": given.policy,
        },
    )


def _check_modes(given: argparse.Namespace) -> None:
    modes = {
        "--quick": given.quick,
        "--find-rate": given.find_rate,
        "--against": given.against is not None,
        "--aiperf": given.aiperf is not None,
    }
    chosen = [flag for flag, wanted in modes.items() if wanted]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} exclude each other: give one of them")
    if given.report is not None and (given.find_rate or given.aiperf is not None):
        raise ValueError(f"--report {given.report} and {chosen[0]} exclude each other: the latter makes no report")
    alone = given.find_rate or given.against is not None
    if alone and given.profile not in (None, "steady"):
        raise ValueError(f"--profile {given.profile} and {chosen[0]} exclude each other: the latter sends steadily")
    if given.aiperf is not None and given.protocol not in (None, "http"):
        raise ValueError(f"--protocol {given.protocol} and --aiperf exclude each other: AIPerf speaks HTTP")
    if given.against is not None and (given.url or given.address or given.protocol not in (None, "http")):
        raise ValueError(
            f"--against {given.against} starts both servers itself and asks them over HTTP: no --url, "
            "--address or --protocol"
        )


def _prompts(given: argparse.Namespace) -> tuple[Sequence[Prompt], dict[str, float]]:
    if given.input is not None:
        from loadtest.sources import load

        prompts: Sequence[Prompt] = load(given.input)
    else:
        from loadtest.workload import read

        prompts = [one for name in classes() for one in read(name)]
    known = list(dict.fromkeys(one.workload for one in prompts))
    if given.mix in (None, "all"):
        return prompts, dict.fromkeys(known, 1.0)
    weights: dict[str, float] = {}
    for part in parts("--mix", given.mix):
        name, equals, weight = part.partition("=")
        if name not in known:
            raise ValueError(f"--mix {name!r} is unknown; accepted: all, {', '.join(known)}, each with =WEIGHT or not")
        weights[name] = positive("--mix", weight) if equals else 1.0
    return prompts, weights


def _profile(given: argparse.Namespace, rate: str, duration_s: float, prompts: Sequence[Prompt]) -> Profile | None:
    timed = prompts[0].at_s is not None
    name = given.profile or (TRACE if timed and not given.find_rate and given.against is None else "steady")
    if name == TRACE:
        if not timed:
            raise ValueError("--profile trace: there are no times without an --input that has timestamps")
        for flag, value in (("--rate", given.rate), ("--peak", given.peak), ("--mix", given.mix)):
            if value is not None:
                raise ValueError(f"{flag} {value}: a trace has its own; accepted: with another --profile")
        return None
    if name not in PROFILES:
        raise ValueError(f"--profile {name!r} is unknown; accepted: {', '.join(PROFILES)}, {TRACE}")
    base = positive("--rate", rate)
    if given.peak is not None and name == "steady":
        raise ValueError(
            f"--peak {given.peak}: a steady profile has none; accepted: with --profile ramp, burst, diurnal"
        )
    peak = base if name == "steady" else 4 * base if given.peak is None else positive("--peak", given.peak)
    if peak < base:
        raise ValueError(f"--peak {given.peak} is below --rate {rate}")
    return Profile(name, base, peak, duration_s)


def _temperature(text: str | None) -> float | None:
    if text is None:
        return None
    value = number(text)
    if value is None or not 0 <= value <= 2:
        raise ValueError(f"--temperature {text!r} is not accepted: give a number from 0 to 2")
    return value


def _check_against(text: str | None) -> None:
    if text in (None, "vllm", "vllm:dsde"):
        return
    engine, colon, length = text.partition(":")
    if engine != "vllm" or not colon:
        accepted = "vllm, vllm:K with K draft tokens a step, or vllm:dsde with our plugin"
        raise ValueError(f"--against {text!r} is unknown; accepted: {accepted}")
    whole("--against vllm:", length, 1, 64)
