"""Every flag of the installed Megatron has exactly one place: planned, refused, named, or without effect."""

from __future__ import annotations

import argparse

from megatron_lynx.cli.megatron_args import PLANNED
from megatron_lynx.cli.megatron_flags import COMPANIONS, places


def megatron_flags() -> list[str]:
    """The long options of Megatron's parser."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve", add_help=False)
    add_megatron_arguments(parser)
    return [flag[2:] for action in parser._actions for flag in action.option_strings if flag[:2] == "--"]


def test_every_flag_has_one_place() -> None:
    flags = megatron_flags()
    assert len(flags) > 700
    wrong = {flag: places(flag) for flag in flags if len(places(flag)) + (flag in PLANNED) != 1}
    assert wrong == {}


def test_companions_name_flags_that_are_named_themselves() -> None:
    tables = {main: [table for table, _ in places(main)] for main in COMPANIONS.values()}
    assert {table for found in tables.values() for table in found} <= {"refused", "unmodelled"}
    assert all(tables.values())
