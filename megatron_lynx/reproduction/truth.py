"""What real GPUs measured, held against what the models predict: memory by rank, and the time of a step.

A folder holds tables (``*.tsv``, lines that begin with ``#`` are comments) in one of two forms:

- a column ``test``: Megatron's flags are in ``args/TEST.args``; ``cluster``, ``dp``, and what was measured
  on the last rank, in bytes and seconds: ``peak_first_step_bytes`` (before Adam's state exists),
  ``peak_bytes``, ``between_steps_bytes``, ``step_s``. A figure that is not known is ``-``;
- a column ``case``: SimuMax's runs on 8 B200, whose names say the job; ``real_ms`` and
  ``max_allocated_MiB_by_rank``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lynx.errors import ConfigError
from megatron_lynx.footprint import MATMUL_WORKSPACE
from megatron_lynx.search.workflow import Job, Planned, plan_job
from megatron_lynx.units import MIB

FIRST, PEAK, BETWEEN, STEP = "first step's peak", "peak", "between steps", "step"
FIGURES = (FIRST, PEAK, BETWEEN, STEP)

_SIMUMAX = re.compile(
    r"llama3_(?P<size>70b|405b)_(?:l(?P<layers>\d+)_)?tp(?P<tp>\d+)_pp(?P<pp>\d+)_dp(?P<dp>\d+)"
    r"(?:_l(?P<layers2>\d+))?_mbc(?P<mbc>\d+)_cef"
)
_SIMUMAX_SHAPES = {
    "70b": "--hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8",
    "405b": "--hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --num-query-groups 16",
}
_SIMUMAX_FLAGS = """
--group-query-attention --seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0.0
--hidden-dropout 0.0 --disable-bias-linear --position-embedding-type rope --swiglu --normalization RMSNorm
--untie-embeddings-and-output-weights --vocab-size 128256 --micro-batch-size 1 --use-distributed-optimizer
--sequence-parallel --bf16 --attention-softmax-in-fp32 --no-masked-softmax-fusion
--accumulate-allreduce-grads-in-fp32 --no-create-attention-mask-in-dataloader
--transformer-impl transformer_engine --cross-entropy-loss-fusion --cross-entropy-fusion-impl te
"""
"""SimuMax, ``simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh``; ``cef`` in a name is the last
line's fused cross entropy. Its script gives the 405B model 16 query groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: Megatron's flags, where it ran, and what was measured on the rank of ``stage`` (-1: the
    last), in bytes and nanoseconds by figure."""

    name: str
    flags: str
    cluster: str
    dp: int
    stage: int
    measured: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A case and what is predicted of it; ``host_bound`` says that the step waits for the host."""

    case: Case
    predicted: Mapping[str, int]
    host_bound: bool = False

    def error(self, figure: str) -> float | None:
        """How far the prediction is above what was measured, as a share of that; None without a figure."""
        real = self.case.measured.get(figure)
        return None if real is None else self.predicted[figure] / real - 1


def read_cases(folder: Path) -> tuple[Case, ...]:
    """The cases of all tables in ``folder``.

    Raises:
        ConfigError: no table, one that cannot be read, or a row that is not of a known form.
    """
    found = []
    for path in sorted(folder.glob("*.tsv")):
        try:
            lines = [line for line in path.read_text("utf-8").splitlines() if line and line[0] != "#"]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); `lynx truth` alone has its own") from error
        names = lines[0].split("\t") if lines else []
        for line in lines[1:]:
            row = dict(zip(names, line.split("\t"), strict=False))
            try:
                found += [_megatron(row, folder)] if "test" in row else _simumax(row)
            except (KeyError, ValueError, OSError) as error:
                raise ConfigError(f"{path}: row {line[:40]!r} cannot be read ({error!r})") from error
    if not found:
        raise ConfigError(f"{folder} holds no table (*.tsv) of measured runs; `lynx truth` alone has its own")
    return tuple(found)


def _megatron(row: Mapping[str, str], folder: Path) -> Case:
    columns = {
        FIRST: ("peak_first_step_bytes", 1),
        PEAK: ("peak_bytes", 1),
        BETWEEN: ("between_steps_bytes", 1),
        STEP: ("step_s", 10**9),
    }
    measured = {
        figure: round(float(row[column]) * scale)
        for figure, (column, scale) in columns.items()
        if row.get(column, "-") not in ("-", "")
    }
    return Case(
        name=row["test"],
        flags=(folder / "args" / f"{row['test']}.args").read_text("utf-8"),
        cluster=row["cluster"],
        dp=int(row["dp"]),
        stage=-1,
        measured=measured,
    )


def _simumax(row: Mapping[str, str]) -> list[Case]:
    """A case for the first and, if it is another, the last stage; the step counts with the last."""
    name = row["case"]
    match = _SIMUMAX.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is not of the form llama3_70b_l12_tp1_pp2_dp4_mbc4_cef")
    tp, pp, dp, microbatches = (int(match[key]) for key in ("tp", "pp", "dp", "mbc"))
    flags = (
        f"--num-layers {match['layers'] or match['layers2']} {_SIMUMAX_SHAPES[match['size']]} "
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--global-batch-size {microbatches * dp} {_SIMUMAX_FLAGS}"
    )
    peaks = dict(part.split(":") for part in row["max_allocated_MiB_by_rank"].split())
    per_stage = tp * dp
    cases = []
    for stage in sorted({0, pp - 1}):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        measured = {PEAK: max(round(float(peaks[str(rank)]) * MIB) for rank in ranks)}
        if stage == pp - 1:
            measured[STEP] = round(float(row["real_ms"]) * 1e6)
        cases.append(
            Case(
                name=name + (f", stage {stage}" if pp > 1 else ""),
                flags=flags,
                cluster=row.get("cluster", "b200-nvlink"),
                dp=dp,
                stage=stage,
                measured=measured,
            )
        )
    return cases


def recomputation(words: Sequence[str]) -> str:
    """The planner that does what Megatron's own ``--recompute-*`` flags in ``words`` ask for."""
    given = {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--recompute-")}
    granularity = given.get("--recompute-granularity")
    if granularity == "full":
        return f"full-{given['--recompute-method']}-{given['--recompute-num-layers']}"
    return "none" if granularity is None else granularity


def compare_case(case: Case, job: Job) -> Compared:
    """Predict what was measured of ``case``, whose flags make ``job``. Memory has no limit here."""
    planned = plan_job(replace(job, memory_bytes=1 << 60), recomputation(case.flags.split()))
    stage = case.stage % job.parallel.pp
    own = job.footprint(stage, len(planned.plan.stages[stage].layers))
    peak = planned.row().stages[stage].peak_bytes
    # fp16 begins with a loss scale that is too large: the first steps are skipped, and make no state.
    skipped = own.optimizer_bytes if "--fp16" in case.flags.split() else 0
    return Compared(
        case=case,
        predicted={
            FIRST: peak - own.optimizer_bytes - _not_yet(planned, stage),
            PEAK: peak,
            BETWEEN: own.between_steps_bytes - skipped,
            STEP: planned.iteration_ns,
        },
        host_bound=planned.host_bound,
    )


def _not_yet(planned: Planned, stage: int) -> int:
    """The workspace that autograd's thread has not made yet at the peak of the first step, if that is the
    head of the only microbatch: no product has run there."""
    first = planned.job.microbatches == 1 and planned.stages[stage].report.peak_point == "forward"
    return MATMUL_WORKSPACE if first else 0


def compare_all(cases: Iterable[Case], job_of: Callable[[Case], Job]) -> tuple[Compared, ...]:
    """Every case beside its prediction; ``job_of`` makes a job of a case's flags."""
    return tuple(compare_case(case, job_of(case)) for case in cases)
