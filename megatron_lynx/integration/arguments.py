"""The command line: ``--recompute-method lynx``, the ``--lynx-*`` flags, and what is refused.

``--recompute-method lynx`` alone is enough. No flag of the user's is changed.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lynx.errors import ConfigError
from megatron_lynx.integration import versions
from megatron_lynx.integration.refusals import REFUSALS
from megatron_lynx.integration.words import in_trainings_words
from megatron_lynx.search.workflow import check_planner
from megatron_lynx.units import parse_bytes

METHOD = "lynx"
PARTITIONS = ("keep", "greedy", "search")


def add_lynx_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Megatron's ``extra_args_provider``: let ``--recompute-method`` take ``lynx``, add the flags."""
    for action in parser._actions:
        if action.dest == "recompute_method" and METHOD not in (action.choices or (METHOD,)):
            action.choices = (*(action.choices or ()), METHOD)
    group = parser.add_argument_group(title="lynx recomputation (--recompute-method lynx)")
    group.add_argument("--lynx-plan", metavar="FILE", help="carry out this plan (`lynx plan --output FILE`)")
    group.add_argument(
        "--lynx-planner",
        metavar="NAME",
        help="make a plan at start: opt, heu, windows, or a baseline such as selective "
        "(default: opt within the memory of the device; windows on a CPU without --lynx-budget)",
    )
    group.add_argument(
        "--lynx-budget", metavar="SIZE", help="memory for training on each device, such as 32GiB"
    )
    group.add_argument(
        "--lynx-partition",
        choices=PARTITIONS,
        default="keep",
        help="layers per pipeline stage: keep Megatron's split, or find one (needs --lynx-profile)",
    )
    group.add_argument(
        "--lynx-profile", metavar="FILE", help="costs from `lynx profile` (default: measure one layer)"
    )
    group.add_argument("--lynx-report", metavar="DIR", help="write what happened in each step there")
    return parser


def lynx_requested(args: Any) -> bool:
    """Whether this run recomputes with lynx."""
    return getattr(args, "recompute_method", None) == METHOD


def check_config(config: Any) -> None:
    """Refuse what only the model's final configuration shows: a script may build it by itself, and Megatron
    derives some of it from other flags.

    Raises:
        ConfigError: names the flag, the value, and what works instead.
    """
    for refusal in REFUSALS:
        refusal.check(config, refusal.config)


def check_arguments(args: Namespace) -> None:
    """Refuse what does not work, before anything starts.

    Raises:
        ConfigError: names both flags, the value, and what works instead.
    """
    given = [flag for flag in ("plan", "planner", "budget", "profile", "report") if _lynx(args, flag)]
    if not lynx_requested(args):
        if given or args.lynx_partition != "keep":
            flag = given[0] if given else "partition"
            raise ConfigError(
                f"--lynx-{flag} {_lynx(args, flag)} needs --recompute-method lynx, which is not given"
            )
        return
    for refusal in REFUSALS:
        refusal.check(args, refusal.fields)
    _check_interleaving(args)
    groups = args.num_query_groups if getattr(args, "group_query_attention", False) else None
    if groups is not None and groups < args.tensor_model_parallel_size:
        raise ConfigError(
            f"--recompute-method lynx does not work with --num-query-groups {groups} below "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}; "
            f"--num-query-groups {args.tensor_model_parallel_size} works"
        )
    if args.lynx_plan and args.lynx_planner:
        raise ConfigError(
            f"--lynx-plan {args.lynx_plan} and --lynx-planner {args.lynx_planner} exclude each other; "
            "leave one out"
        )
    if args.lynx_planner:
        with in_trainings_words():
            check_planner(args.lynx_planner)
    for flag in ("plan", "profile"):
        name = _lynx(args, flag)
        if name and not Path(name).is_file():
            raise ConfigError(f"--lynx-{flag} {name}: there is no such file; `lynx {flag}` writes one")
    if args.lynx_budget and parse_bytes(args.lynx_budget, "--lynx-budget") < 1:
        raise ConfigError(f"--lynx-budget {args.lynx_budget} is no memory; --lynx-budget 32GiB works")
    if args.lynx_report and Path(args.lynx_report).exists() and not Path(args.lynx_report).is_dir():
        raise ConfigError(f"--lynx-report {args.lynx_report} is a file; the name of a folder works")
    if args.lynx_partition != "keep":
        _check_partition(args)


def _check_interleaving(args: Namespace) -> None:
    """Refuse the schedule whose stock results cannot be relied on, below Megatron-Core 0.18."""
    fields = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    given = [field for field in fields if getattr(args, field, None)]
    if given and getattr(args, "overlap_p2p_comm", True) and versions.frees_while_sending():
        flag = "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"--recompute-method lynx does not work with {flag} {getattr(args, given[0])} here: "
            f"{versions.find_megatron()} frees outputs that it is still sending, so that its own losses "
            "differ from run to run; 0.18 works, or --no-overlap-p2p-communication with "
            "--pipeline-model-parallel-size above 2"
        )


def check_yaml(words: Sequence[str]) -> None:
    """Refuse lynx beside ``--yaml-cfg``, whose arguments replace those of the command line: before Megatron
    reads the file, as its parser fails at whatever else the file leaves out.

    Raises:
        ConfigError: names the file.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--yaml-cfg")
    name = parser.parse_known_args(words)[0].yaml_cfg
    if not name:
        return
    asked = METHOD in words or any(word.startswith("--lynx-") for word in words)
    if asked or re.search(rf"recompute_method\W+{METHOD}\b", _text_of(Path(name))):
        raise ConfigError(
            f"--recompute-method lynx does not work with --yaml-cfg {name}; flags instead of the file work"
        )


def _text_of(path: Path) -> str:
    """What a file holds; nothing where Megatron is the one to say that it is missing."""
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def _check_partition(args: Namespace) -> None:
    """Refuse a split that somebody else decides, or that nothing is known about."""
    asked = f"--lynx-partition {args.lynx_partition}"
    for field in (
        "pipeline_model_parallel_layout",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    ):
        value = getattr(args, field, None)
        if value is not None:
            flag = "--" + field.replace("_", "-")
            raise ConfigError(f"{asked} and {flag} {value} exclude each other; --lynx-partition keep works")
    if args.pipeline_model_parallel_size == 1:
        raise ConfigError(
            f"{asked} needs --pipeline-model-parallel-size above 1; --lynx-partition keep works"
        )
    if not args.lynx_profile:
        raise ConfigError(
            f"{asked} needs costs before the model is built: --lynx-profile FILE (`lynx profile`) works"
        )


def _lynx(args: Namespace, flag: str) -> Any:
    return getattr(args, f"lynx_{flag}")


def budget_bytes(args: Namespace) -> int | None:
    """``--lynx-budget`` in bytes; None if it is not given."""
    return parse_bytes(args.lynx_budget, "--lynx-budget") if args.lynx_budget else None


ArgumentsProvider = Callable[[ArgumentParser], ArgumentParser]


def with_lynx_arguments(provider: ArgumentsProvider | None) -> ArgumentsProvider:
    """``provider`` (a script's own ``extra_args_provider``) and lynx's arguments after it."""

    def provide(parser: ArgumentParser) -> ArgumentParser:
        return add_lynx_arguments(parser if provider is None else provider(parser))

    return provide
