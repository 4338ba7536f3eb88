"""The comparison of arXiv 2406.08756: planners on GPT 1.3B-23B, on an NVLink and a PCIe cluster.

The paper's settings are not public, so ours are chosen by rule (``settings``) and not by result.
``measure`` plans every method for one setting and keeps what the document needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any, Literal

from megatron_lynx.errors import ConfigError, InfeasibleError
from megatron_lynx.hardware import Cluster
from megatron_lynx.job import Job, make_job
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.search.workflow import TIME_LIMIT_S, Planned, plan_job
from megatron_lynx.spec import Batch, Parallel

SCHEMA = 1
MODELS = ("gpt-1.3b", "gpt-7b", "gpt-13b", "gpt-4.7b", "gpt-2.7b", "gpt-20b", "gpt-23b")
"""The paper's sizes."""
CLUSTERS = ("a100-40g-nvlink", "a100-40g-pcie")
ATTENTION: tuple[Literal["flash", "unfused"], ...] = ("flash", "unfused")
SEQUENCE, TP, PP = 2048, 4, 4
PER_STAGE = 4
"""Microbatches of a step for every pipeline stage."""

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)

PRIOR = ("full-uniform", "full-block", "selective")
"""What Megatron has; with ``checkmate`` this is the prior work that the paper names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One training job. ``pressure`` says how the microbatch was chosen."""

    model: str
    cluster: str
    attention: Literal["flash", "unfused"]
    micro_batch_size: int
    pressure: Literal["light", "tight"]

    def job(self, layout: str | None = None) -> Job:
        """The job, on Megatron's even split or on ``layout``."""
        return _job(self.model, self.attention, self.micro_batch_size, load_cluster(self.cluster), layout)

    def __str__(self) -> str:
        """``gpt-7b, flash, microbatch 8``."""
        return f"{self.model}, {self.attention}, microbatch {self.micro_batch_size}"


def _job(
    model: str,
    attention: Literal["flash", "unfused"],
    micro_batch_size: int,
    cluster: Cluster,
    layout: str | None = None,
) -> Job:
    return make_job(
        load_model(model, transformer_impl="local", attention=attention),
        Parallel(tp=TP, pp=PP),
        Batch(
            seq_length=SEQUENCE,
            micro_batch_size=micro_batch_size,
            global_batch_size=PER_STAGE * PP * micro_batch_size,
        ),
        cluster=cluster,
        layout=layout,
        check_split=False,
    )


def _fits(job: Job, method: str) -> bool:
    try:
        plan_job(job, method)
    except InfeasibleError:
        return False
    return True


def settings(models: Sequence[str] = MODELS, clusters: Sequence[str] = CLUSTERS) -> Iterator[Setting]:
    """All settings, by this rule: per model and attention kernel two microbatches, powers of two.

    ``light`` is the smallest with which something has to be recomputed, ``tight`` the largest with
    which Megatron's full recomputation still fits. Where they are one, it is called tight.
    """
    for cluster in clusters:
        place = load_cluster(cluster)
        for model in models:
            for attention in ATTENTION:
                jobs = {size: _job(model, attention, size, place) for size in MICRO_BATCHES}
                full = [size for size in MICRO_BATCHES if _fits(jobs[size], "full-uniform-1")]
                needs = [size for size in full if not _fits(jobs[size], "none")]
                if needs and needs[0] < full[-1]:
                    yield Setting(
                        model=model,
                        cluster=cluster,
                        attention=attention,
                        micro_batch_size=needs[0],
                        pressure="light",
                    )
                if needs:
                    yield Setting(
                        model=model,
                        cluster=cluster,
                        attention=attention,
                        micro_batch_size=full[-1],
                        pressure="tight",
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one method makes of one setting; times are None if it does not fit.

    ``search_ns`` is the wall time of planning all stages, ``stage_ns`` the solver's for one stage
    on average. ``gap`` is the largest distance to a proven bound over the stages.
    """

    iteration_ns: int | None
    layout: str | None = None
    exposed_ns: int = 0
    hidden_ns: int = 0
    search_ns: int = 0
    stage_ns: int = 0
    gap: float = 0.0

    @classmethod
    def of(cls, planned: Planned, search_ns: int) -> Outcome:
        """Read a plan's figures."""
        reports = [stage.report for stage in planned.stages]
        return cls(
            iteration_ns=planned.iteration_ns,
            layout=planned.plan.layout,
            exposed_ns=sum(r.exposed_ns for r in reports),
            hidden_ns=sum(r.hidden_ns for r in reports),
            search_ns=search_ns,
            stage_ns=sum(r.wall_ns for r in reports) // len(reports),
            gap=max(r.gap for r in reports),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All outcomes of a setting by name: a method's, or ``METHOD + greedy``, ``METHOD + search``
    (the partitioner moves layers) and ``METHOD + split`` (on the layers that ``heu + search`` chose).
    """

    setting: Setting
    outcomes: Mapping[str, Outcome]

    def speedup(self, name: str, over: Sequence[str]) -> float | None:
        """How many times faster ``name`` is than the fastest of ``over``; None if one is missing."""
        mine = self.outcomes[name].iteration_ns
        theirs = [t for other in over if (t := self.outcomes[other].iteration_ns) is not None]
        return min(theirs) / mine if mine and theirs else None


KEEP = (*PRIOR, "checkmate", "heu", "opt")
"""Methods on Megatron's even split."""

MOVED = ("heu + greedy", "heu + search", "checkmate + split", "opt + split")
"""Methods with the partitioner."""


def measure(
    setting: Setting, names: Sequence[str] = (*KEEP, *MOVED), time_limit_s: float = TIME_LIMIT_S
) -> Result:
    """Plan a setting with every method of ``names``."""
    outcomes: dict[str, Outcome] = {}
    for name in names:
        method, _, partition = name.partition(" + ")
        layout = None
        if partition == "split":
            layout, partition = outcomes["heu + search"].layout, "keep"
            if layout is None:
                outcomes[name] = outcomes[method]
                continue
        started = perf_counter_ns()
        try:
            job = setting.job(layout)
            planned = plan_job(job, method, partition or "keep", time_limit_s=time_limit_s)
            outcomes[name] = Outcome.of(planned, perf_counter_ns() - started)
        except InfeasibleError:
            outcomes[name] = Outcome(iteration_ns=None)
    return Result(setting=setting, outcomes=outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Smallest, median and largest of some numbers, and how many there are."""

    count: int
    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """The spread of what is not None."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(count=len(known), low=min(known), middle=median(known), high=max(known))


def speedups(results: Sequence[Result], name: str, over: Sequence[str]) -> Spread | None:
    """The spread of a speedup over all results."""
    return Spread.of([result.speedup(name, over) for result in results])


def search_seconds(results: Sequence[Result], name: str) -> tuple[float, float]:
    """(one stage, all stages) on average, where the method fits."""
    found = [r.outcomes[name] for r in results if r.outcomes[name].iteration_ns is not None]
    count = max(1, len(found))
    return sum(o.stage_ns for o in found) / count / 1e9, sum(o.search_ns for o in found) / count / 1e9


def to_json(results: Sequence[Result]) -> str:
    """The results as JSON, one setting a line."""
    lines = [
        json.dumps(
            {
                "setting": asdict(result.setting),
                "outcomes": {name: asdict(o) for name, o in result.outcomes.items()},
            }
        )
        for result in results
    ]
    return f'{{"schema": {SCHEMA}, "results": [\n' + ",\n".join(lines) + "\n]}\n"


def from_json(text: str, where: str) -> tuple[Result, ...]:
    """Read what ``to_json`` wrote; ``where`` names the file in errors.

    Raises:
        ConfigError: not such a file.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}")
        return tuple(
            Result(
                setting=Setting(**row["setting"]),
                outcomes={name: Outcome(**o) for name, o in row["outcomes"].items()},
            )
            for row in data["results"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} does not hold results of `lynx reproduce` ({error!r}); without --reuse it is made anew"
        ) from error
