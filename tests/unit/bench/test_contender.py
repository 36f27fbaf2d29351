from __future__ import annotations

import pytest

from dsde.bench.contender import LENGTHS, contenders
from dsde.control.policies import policy_names


def test_everybody_takes_part_once_the_baseline_first() -> None:
    everybody = contenders()
    labels = [one.label for one in everybody]
    fixed = [f"static-{length}" for length in LENGTHS]
    others = [name for name in policy_names() if name not in ("static", "autoregressive")]
    assert labels == ["autoregressive", *fixed, *others]
    assert everybody[0].policy is None
    assert [one.settings for one in everybody[1:3]] == [{"length": 1}, {"length": 2}]


def test_fixed_lengths_are_sorted_and_resting_is_none_of_them() -> None:
    chosen = contenders(["paper", "static-4", "static-0", "static-2", "static-4"])
    assert [(one.label, one.length) for one in chosen] == [
        ("autoregressive", None),
        ("static-2", 2),
        ("static-4", 4),
        ("paper", None),
        ("static-0", None),
    ]


def test_settings_ride_on_the_name() -> None:
    chosen = contenders(["paper:min_length=1:decay=0.9"])[1]
    assert (chosen.label, chosen.policy) == ("paper:min_length=1:decay=0.9", "paper")
    assert chosen.settings == {"min_length": 1, "decay": 0.9}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fastest", r"--policies 'fastest' is unknown; accepted: autoregressive, static, static-K, .*paper"),
        ("static-11", r"--policies 'static-11': accepted: static-0 to static-10"),
        ("paper:decay", r"--policies 'paper:decay': 'decay' is no setting; accepted: NAME:SETTING=VALUE"),
        ("paper:speed=1", r"speculation\.settings\.speed 1 is not a setting of policy 'paper'"),
        ("paper:decay=2", r"speculation\.settings\.decay 2 is not accepted"),
        ("paper:decay=[", r"--policies 'paper:decay=\[': '\[' is not YAML"),
    ],
)
def test_a_bad_name_says_what_is_accepted(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        contenders([name])
