"""``lynx doctor`` asks Megatron's own parser, and lynx's own refusals."""

from __future__ import annotations

import sys

import pytest

from megatron_lynx.integration.parsing import parser_complaint

HEALTHY = [
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--transformer-impl",
    "local",
]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--num-heads 4", "unrecognized arguments: --num-heads 4"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        (
            "--recompute-method lynx --cpu-offloading-num-layers 1 --fp8-format hybrid",
            "--cpu-offloading-num-layers 1",
        ),
        ("--recompute-method lynx --lynx-planner opt --lynx-plan " + __file__, "exclude each other"),
    ],
)
def test_what_would_end_the_run_is_said(flags: str, says: str) -> None:
    before = list(sys.argv)
    complaint = parser_complaint([*HEALTHY, *flags.split()])
    assert complaint is not None
    assert says in complaint
    assert sys.argv == before


def test_nothing_is_said_of_a_healthy_command_line() -> None:
    assert parser_complaint([*HEALTHY, "--recompute-method", "lynx"]) is None
