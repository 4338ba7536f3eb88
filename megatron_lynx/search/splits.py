"""Which layers go to which stage: the job's own layout, or what the partitioner finds.

Composes ``partition``, which knows neither planners nor the simulator, with ``StagePlans``.
"""

from __future__ import annotations

from megatron_lynx.errors import ConfigError, InfeasibleError
from megatron_lynx.job import Job
from megatron_lynx.partition.balance import Evaluations, Partition, even, greedy, search
from megatron_lynx.partition.layout import parse_layout
from megatron_lynx.partition.seeds import bottleneck
from megatron_lynx.search.lacking import does_not_fit
from megatron_lynx.search.stages import Split, StagePlans


def searched(plans: StagePlans, planner: str, partition: str) -> Split:
    """The split that ``partition`` finds for a planner; for ``opt``, by way of ``heu``.

    Raises:
        InfeasibleError: no split fits (``greedy``: the one it starts from does not).
    """
    job, pp = plans.job, plans.job.parallel.pp
    quick = "heu" if planner in ("opt", "mixed") else planner
    start = Partition(pp=pp, layers=given_split(job))
    stalls = plans.free_stalls(start.layers)
    evaluations = Evaluations(
        plan_stage=lambda rank, layers: plans.stage(rank, layers, quick, stalls[rank]),
        score=plans.iteration,
        period=lambda stage: plans.times(stage).period_ns,
        whole=lambda split: plans.best(split.layers, quick, rounds=1),
        floor=lambda split: plans.floor(split.layers),
        hurry=plans.late,
        over=plans.over,
    )
    if partition == "greedy":
        return greedy(start, evaluations).partition.layers
    try:
        found = search(job.model.num_layers, pp, job.parallel.vpp, evaluations, job.microbatches)
    except InfeasibleError as error:
        return _roomiest(plans, planner, quick, error)
    return found.partition.layers


def _roomiest(plans: StagePlans, planner: str, quick: str, error: InfeasibleError) -> Split:
    """When ``quick`` finds no split: the one that needs least memory, if ``planner`` fits it.

    Raises:
        InfeasibleError: it does not; says which memory and which split would. With several chunks
            per rank the splits are too many, and ``error`` is raised.
    """
    job, pp, total = plans.job, plans.job.parallel.pp, plans.job.model.num_layers
    if job.parallel.vpp > 1:
        raise error

    def least(rank: int, layers: int, name: str) -> int:
        if plans.over():
            error.args = (f"{error}; --time-limit ended the search for another split, a longer one may do",)
            raise error
        return plans.needed(rank, (layers,), name)

    needed = [{n: least(rank, n, quick) for n in range(1, total - pp + 2)} for rank in range(pp)]
    split = bottleneck(needed, total)
    if split is None:
        raise error
    own = needed
    if planner != quick:
        own = [{n: least(rank, n, planner)} for rank, n in enumerate(split)]
    stage = max(range(pp), key=lambda rank: own[rank][split[rank]])
    if own[stage][split[stage]] <= job.memory_bytes:
        return split
    static = job.footprint(stage, split[stage]).static_bytes
    found = does_not_fit(job, stage, own[stage][split[stage]], static, planner)
    found.args = (f"{found}, with {' '.join(map(str, split))} layers a stage",)
    raise found from error


def given_split(job: Job) -> Split:
    """The split of the job's layout, or the even one.

    Raises:
        ConfigError: the layout is malformed, or has another number of layers or stages.
    """
    if job.layout is None:
        return even(job.model.num_layers, job.parallel.pp, job.parallel.vpp).layers
    layout = parse_layout(job.layout, job.parallel.pp)
    layout.check_num_layers(job.model.num_layers)
    if layout.vpp != job.parallel.vpp:
        raise ConfigError(
            f"--layout {job.layout} has {layout.vpp} stages per rank, but --vpp is {job.parallel.vpp}; "
            f"--vpp {layout.vpp} works"
        )
    return layout.counts
