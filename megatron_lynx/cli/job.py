"""The flags that describe a job, shared by every command that plans one.

A value comes from the command line, else from the launch (``--from-args``, or what follows ``--``), else
from ``--run``, else from ``--model``, else from a default. Flags of the model carry Megatron's own names.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_lynx.cli.megatron_args import MegatronArgs, read_args, read_command
from megatron_lynx.cli.memory_flags import for_device, optimizer_from
from megatron_lynx.cli.sizes import derive
from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError
from megatron_lynx.hardware import Cluster
from megatron_lynx.layers import KINDS
from megatron_lynx.presets import load_cluster, make_model, read_toml, usable_names
from megatron_lynx.search.workflow import (
    PARTITIONS,
    TIME_LIMIT_S,
    Job,
    Planned,
    make_job,
    plan_job,
    planner_names,
)
from megatron_lynx.spec import Batch, Model, Parallel
from megatron_lynx.units import parse_bytes, parse_ns

DEFAULTS: Mapping[str, Any] = {
    "cluster": "a100-40g-nvlink",
    "tp": 1,
    "pp": 1,
    "vpp": 1,
    "dp": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "micro_batch_size": 1,
    "planner": "opt",
    "partition": "keep",
}
_RUN_KEYS = frozenset(
    {
        *DEFAULTS,
        *("model", "layout", "budget", "profile", "seq_length", "global_batch_size"),
        *("microbatch_group_size", "attention"),
    }
)


def whole(text: str) -> int:
    """argparse type: a whole number of at least 1."""
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; 4 works") from error


def fraction(text: str) -> float:
    """argparse type: a number."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; 0.1 works") from error


def add_job_flags(parser: argparse.ArgumentParser, *, plans: bool = True) -> None:
    """Add the flags of a job; ``plans`` adds those that choose a planner and a partition too."""
    job = parser.add_argument_group("job")
    job.add_argument("--model", metavar="NAME|FILE", help=f"one of {', '.join(usable_names('models'))}")
    job.add_argument("--cluster", metavar="NAME|FILE", help=f"one of {', '.join(usable_names('clusters'))}")
    job.add_argument("--run", metavar="NAME|FILE", help="a whole job from a file of configs/runs")
    job.add_argument(
        "--from-args",
        metavar="FILE",
        help="a Megatron launch script (bash reads it; nothing is started or written), list of arguments, "
        "YAML config, checkpoint, or what `lynx capture` wrote; `-- COMMAND` at the end is the command",
    )
    job.add_argument("--launch", type=whole, metavar="N", help="which of several trainings of a script")
    job.add_argument(
        "--ignore", action="append", metavar="FLAG", help="plan as if the launch did not have this flag"
    )
    job.add_argument("--profile", metavar="FILE", help="measured costs, as `lynx profile` writes them")
    job.add_argument("--budget", metavar="SIZE", help="memory of a device that training may take: 32GiB")
    job.add_argument("--tp", "--tensor-model-parallel-size", type=whole, metavar="N")
    job.add_argument("--pp", "--pipeline-model-parallel-size", type=whole, metavar="N")
    job.add_argument("--vpp", "--num-virtual-stages-per-pipeline-rank", type=whole, metavar="N")
    job.add_argument("--dp", type=whole, metavar="N", help="data-parallel size")
    job.add_argument("--world-size", type=whole, metavar="N", help="number of GPUs, in place of --dp")
    job.add_argument("--sequence-parallel", action="store_true", default=None)
    job.add_argument("--use-distributed-optimizer", action="store_true", default=None)
    job.add_argument("--seq-length", type=whole, metavar="N")
    job.add_argument("--micro-batch-size", type=whole, metavar="N")
    job.add_argument("--global-batch-size", type=whole, metavar="N")
    job.add_argument(
        "--layout", "--pipeline-model-parallel-layout", metavar="TEXT", help="'Et*6|(t*6|)*2t*6L'"
    )
    job.add_argument("--time-limit", metavar="TIME", help="what planning may take: 40s")
    if plans:
        job.add_argument("--planner", choices=planner_names(), help="default: opt")
        job.add_argument("--partition", choices=PARTITIONS, help="default: keep")
    _add_model_flags(parser.add_argument_group("model", "single fields, by Megatron's names"))


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    for name in (
        *("num-layers", "hidden-size", "num-attention-heads", "num-query-groups", "kv-channels"),
        *("ffn-hidden-size", "vocab-size", "max-position-embeddings"),
    ):
        group.add_argument(f"--{name}", type=whole, metavar="N")
    for name in ("attention-dropout", "hidden-dropout"):
        group.add_argument(f"--{name}", type=fraction, metavar="P")
    for name in ("rotary-percent", "activation-func-clamp-value"):
        group.add_argument(f"--{name}", type=fraction, metavar="X")
    group.add_argument("--transformer-impl", choices=sorted(KINDS), help="default: transformer_engine")
    group.add_argument("--position-embedding-type", choices=("learned_absolute", "rope", "yarn", "none"))
    group.add_argument("--softmax-type", choices=("vanilla", "off-by-one", "learnable"))
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"))
    group.add_argument(
        "--attention",
        choices=("flash", "fused", "unfused"),
        help="which attention kernels run; default: what Megatron takes on that device",
    )
    for name in ("squared-relu", "quick-geglu", "qk-layernorm", "attention-output-gate"):
        group.add_argument(f"--{name}", action="store_true", default=None)
    for name in ("swiglu", "untie-embeddings-and-output-weights", "attention-softmax-in-fp32"):
        group.add_argument(f"--{name}", action="store_true", default=None)
    group.add_argument("--disable-bias-linear", action="store_false", default=None, dest="add_bias_linear")
    for name in ("no-bias-gelu-fusion", "no-bias-swiglu-fusion"):
        group.add_argument(f"--{name}", action="store_false", default=None, dest="fused_activation")
    group.add_argument("--fp32", action="store_const", const=4, dest="dtype_bytes", help="default: bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A job and how to plan it, as the flags say.

    ``job`` is checked; ``planner`` and ``partition`` are names; ``time_limit_s`` is for ``opt``, and
    ``deadline`` is when a limit that was given ends (``time.monotonic``); ``notes`` are lines for people:
    flags that were ignored, values that were assumed. ``refused`` are flags of the launch that are not
    planned, and that ``--ignore`` left out.
    """

    job: Job
    planner: str
    partition: str
    time_limit_s: float
    deadline: float | None
    notes: tuple[str, ...]
    refused: tuple[str, ...] = ()


def choices_from(args: argparse.Namespace, *, check_split: bool = True) -> Choices:
    """Put the job together from all sources.

    Raises:
        ConfigError: names the flag, its value and a value that works.
    """
    given = _given(args)
    values, model, script, chosen = _sources(given)
    if values["planner"] not in planner_names():
        raise ConfigError(f"--planner {values['planner']!r} is unknown; {', '.join(planner_names())} works")
    if values["partition"] not in PARTITIONS:
        raise ConfigError(f"--partition {values['partition']!r} is unknown; {', '.join(PARTITIONS)} works")
    cluster = load_cluster(values["cluster"])
    notes = derive(values, model.num_layers, script, chosen)
    job = _job(values, model, cluster, check_split=check_split and values["partition"] == "keep")
    notes += script.all_notes() if script else []
    limit = values.get("time_limit")
    return Choices(
        job=job,
        planner=values["planner"],
        partition=values["partition"],
        time_limit_s=parse_ns(limit, "--time-limit") / 1e9 if limit else TIME_LIMIT_S,
        deadline=time.monotonic() + parse_ns(limit, "--time-limit") / 1e9 if limit else None,
        notes=tuple(notes),
        refused=script.left_out if script else (),
    )


def planned_by(choices: Choices) -> Planned:
    """The job planned as the flags say.

    Raises:
        InfeasibleError: no plan fits.
    """
    return plan_job(
        choices.job,
        choices.planner,
        choices.partition,
        time_limit_s=choices.time_limit_s,
        deadline=choices.deadline,
    )


def values_from(
    args: argparse.Namespace,
) -> tuple[dict[str, Any], Model, MegatronArgs | None, list[str]]:
    """What all sources say, the model, the launch if there is one, and notes; sizes stay as they are given.

    Raises:
        ConfigError: names the flag, its value and a value that works.
    """
    values, model, script, _ = _sources(_given(args))
    return values, model, script, script.all_notes() if script else []


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if value is not None}


def _sources(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], Model, MegatronArgs | None, dict[str, Any]]:
    """Values of all sources, the model, the launch, and the values that were chosen beside it."""
    script = _script(given)
    run = _read_run(given["run"]) if "run" in given else {}
    values: dict[str, Any] = {**DEFAULTS, **run, **(script.values if script else {}), **given}
    chosen = {**run, **given}
    model = _model(
        values, load_cluster(values["cluster"]), standalone=script is not None and "model" not in chosen
    )
    return values, model, script, chosen


def _script(given: Mapping[str, Any]) -> MegatronArgs | None:
    """The launch of ``--from-args`` or of the words after ``--``.

    Raises:
        ConfigError: both are given, or the job is of a kind that is not planned.
    """
    ignore = [name.removeprefix("--") for name in given.get("ignore", ())]
    number = given.get("launch")
    if given.get("command_line") is not None:
        if "from_args" in given:
            raise ConfigError(
                f"--from-args {given['from_args']} and a command after -- are two jobs; one works"
            )
        script = read_command(given["command_line"], number, ignore)
    elif "from_args" in given:
        script = read_args(given["from_args"], number, ignore)
    else:
        return None
    script.check()
    return script


def _read_run(name: str) -> dict[str, Any]:
    data, where = read_toml("runs", name)
    values = {key.replace("-", "_"): value for key, value in data.items()}
    known = _RUN_KEYS | {field.name for field in fields(Model)}
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: {key!r} is not a flag of a job; micro-batch-size is one")
    return values


def _model(values: Mapping[str, Any], cluster: Cluster, *, standalone: bool) -> Model:
    """The model of ``--model`` with single fields replaced; a script's model stands alone.

    Its layers are Transformer Engine's unless something else is said: Megatron's own default.
    """
    single = {field.name: values[field.name] for field in fields(Model) if field.name in values}
    if "model" in values and not standalone:
        data, where = read_toml("models", values["model"])
        stem = Path(values["model"]).stem if values["model"].endswith(".toml") else values["model"]
        single = {"name": stem, **data, **single}
    elif "num_layers" not in values:
        raise ConfigError("--model is missing; --model gpt-7b works, or a shape by --num-layers and so on")
    else:
        where = "model"
    single.setdefault("transformer_impl", "transformer_engine")
    single.setdefault("attention", "auto")
    for_device(single, cluster.device.name)
    learned = single.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    if "max_position_embeddings" not in single and "seq_length" in values:
        single["max_position_embeddings"] = values["seq_length"]
    positions = single.get("max_position_embeddings")
    if learned and positions and values.get("seq_length", 0) > positions:
        raise ConfigError(
            f"--seq-length {values['seq_length']} is above --max-position-embeddings {positions}; "
            f"--max-position-embeddings {values['seq_length']} works"
        )
    return make_model(single, where)


def _job(values: Mapping[str, Any], model: Model, cluster: Cluster, *, check_split: bool) -> Job:
    parallel = Parallel(
        tp=values["tp"],
        pp=values["pp"],
        vpp=values["vpp"],
        dp=values["dp"],
        sequence_parallel=values["sequence_parallel"],
        microbatch_group_size=values.get("microbatch_group_size"),
    )
    micro = values["micro_batch_size"]
    batch = Batch(
        seq_length=values.get("seq_length", model.max_position_embeddings or 2048),
        micro_batch_size=micro,
        global_batch_size=values.get("global_batch_size", 4 * parallel.pp * parallel.dp * micro),
    )
    budget = values.get("budget")
    return make_job(
        model,
        parallel,
        batch,
        cluster=cluster,
        costs=read_profile(values["profile"]) if "profile" in values else None,
        memory_bytes=parse_bytes(budget, "--budget") if budget is not None else None,
        optimizer=optimizer_from(values),
        layout=values.get("layout"),
        check_split=check_split,
    )


def read_profile(path: str) -> CostTable:
    """The costs in ``--profile FILE``.

    Raises:
        ConfigError: it cannot be read, or is no table of costs.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--profile {path!r} cannot be read ({error}); `lynx profile` writes one"
        ) from error
    return CostTable.from_json(text, f"--profile {path}")


Run = Callable[[argparse.Namespace], int]
"""What a command module calls ``run``."""
