"""Job: everything that planning needs to know about a training run, checked as a whole.

A job is a model, its parallel sizes and batch, the costs of its operations, and the memory that
training may take on a device. Costs are estimated from a cluster or measured (``CostTable``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError
from megatron_lynx.estimate import estimate_costs, host_costs
from megatron_lynx.footprint import Footprint, footprint, step_ns, weight_gradient_bytes
from megatron_lynx.graph import LayerGraph
from megatron_lynx.hardware import Cluster
from megatron_lynx.layers import kind_of, layer_graph
from megatron_lynx.schedule import check_microbatches, in_flight
from megatron_lynx.spec import (
    Batch,
    Facts,
    Model,
    Optimizer,
    Parallel,
    differing,
    divides,
    flag_of,
    layer_facts,
)
from megatron_lynx.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training run. Make it with ``make_job``, which checks what holds for the whole.

    ``memory_bytes`` is what training may take on one device, static memory included. ``layout`` is
    Megatron's ``--pipeline-model-parallel-layout`` where the user gave one. Without a ``cluster``
    (costs measured in place) the optimizer's step counts as free. ``counted`` are the parameters of each
    stage, and how many of them train, where a real model of that split was counted.
    """

    model: Model
    parallel: Parallel
    batch: Batch
    graph: LayerGraph
    costs: CostTable
    memory_bytes: int
    optimizer: Optimizer = field(default_factory=Optimizer)
    layout: str | None = None
    cluster: Cluster | None = None
    counted: tuple[tuple[int, int], ...] = ()

    @property
    def microbatches(self) -> int:
        """Microbatches that each pipeline runs in a step."""
        return self.batch.num_microbatches(self.parallel.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch.global_batch_size * self.batch.seq_length

    @property
    def workspace_bytes(self) -> tuple[int, ...]:
        """What each phase of a layer's backward needs besides saved storages."""
        if self.costs.workspace_bytes:
            return self.costs.workspace_bytes
        shape = self.model, self.parallel, self.batch
        gradients = weight_gradient_bytes(self.graph, *shape, self.optimizer)
        return tuple(map(sum, zip(kind_of(self.model).workspace_bytes(*shape), gradients, strict=True)))

    def footprint(self, stage: int, layers: int) -> Footprint:
        """Memory of rank ``stage`` with ``layers`` layers, without their activations."""
        return footprint(
            self.model,
            self.parallel,
            self.batch,
            stage=stage,
            layers=layers,
            in_flight=in_flight(self.parallel, self.microbatches, stage)[0],
            optimizer=self.optimizer,
            counted=self.counted[stage] if self.counted else None,
            **({"te_workspace_bytes": self.cluster.device.te_workspace_bytes} if self.cluster else {}),
        )

    def step_ns(self, parameters: int) -> int:
        """Time of the optimizer's step on a rank with so many parameters."""
        if self.cluster is None:
            return 0
        layers = -(-self.model.num_layers // self.parallel.pp)
        return step_ns(
            parameters,
            self.model,
            self.parallel,
            self.cluster,
            self.optimizer,
            forward_ns=layers * self.costs.layer.layer_forward_ns,
            backward_ns=layers * self.costs.layer.layer_backward_ns,
        )

    def host_costs(self) -> CostTable | None:
        """What the host needs for the same; None where the cluster says nothing of it."""
        if self.cluster is None or self.cluster.host is None:
            return None
        kind = kind_of(self.model)
        return host_costs(kind, self.model, self.parallel, self.batch, self.cluster.host)


MOST_LAYERS, MOST_MICROBATCHES = 10_000, 100_000
"""What is planned at most: a mistyped size is an error, not an hour of work."""


def check_job(model: Model, parallel: Parallel, batch: Batch) -> None:
    """Check what holds only for the three together, before anything is planned or started.

    Raises:
        ConfigError: names the flag, its value and a value that works.
    """
    tp, microbatches = parallel.tp, batch.num_microbatches(parallel.dp)
    for flag, value, most in (
        ("--num-layers", model.num_layers, MOST_LAYERS),
        ("--global-batch-size", microbatches, MOST_MICROBATCHES),
    ):
        if value > most:
            what = "layers" if flag == "--num-layers" else "microbatches a step"
            raise ConfigError(
                f"{flag}: {value} {what} are more than the {most} that are planned; {most} works"
            )
    shared = (
        ("num_attention_heads", model.num_attention_heads),
        ("num_query_groups", model.groups),
        ("ffn_hidden_size", model.ffn),
    )
    for name, total in shared:
        if total % tp:
            works = max(t for t in range(1, tp) if all(size % t == 0 for _, size in shared))
            raise ConfigError(f"{flag_of(name)} {total} is not divisible by --tp {tp}; --tp {works} works")
    if parallel.sequence_parallel:
        divides(tp * parallel.cp, "tp", batch.seq_length, "seq_length")
    halves = 2 * parallel.cp if parallel.cp > 1 else 1
    if batch.seq_length % halves:
        raise ConfigError(
            f"--seq-length {batch.seq_length} is not divisible by {halves}, twice --context-parallel-size; "
            f"--seq-length {halves * (batch.seq_length // halves + 1)} works"
        )
    if parallel.pp * parallel.vpp > model.num_layers:
        raise ConfigError(
            f"--num-layers {model.num_layers} is fewer than the {parallel.pp * parallel.vpp} stages "
            f"of --pp {parallel.pp} --vpp {parallel.vpp}; --pp 1 works"
        )
    per_step = batch.micro_batch_size * parallel.dp
    if batch.global_batch_size % per_step:
        raise ConfigError(
            f"--global-batch-size {batch.global_batch_size} is not a multiple of "
            f"--micro-batch-size {batch.micro_batch_size} x --dp {parallel.dp}; "
            f"--global-batch-size {(batch.global_batch_size // per_step + 1) * per_step} works"
        )
    if (
        parallel.vpp > 1
        and microbatches % parallel.group_size
        and (microbatches % parallel.group_size < parallel.pp)
    ):
        raise ConfigError(
            f"--vpp {parallel.vpp} needs a number of microbatches that is a multiple of "
            f"{parallel.group_size}; --global-batch-size {per_step * parallel.group_size} works"
        )


def make_job(
    model: Model,
    parallel: Parallel,
    batch: Batch,
    *,
    cluster: Cluster | None = None,
    costs: CostTable | None = None,
    memory_bytes: int | None = None,
    optimizer: Optimizer | None = None,
    layout: str | None = None,
    check_split: bool = True,
    counted: tuple[tuple[int, int], ...] = (),
    fixed: frozenset[str] = frozenset(),
) -> Job:
    """Put a job together.

    ``costs`` replace the estimate; ``memory_bytes`` replaces what the cluster's devices offer.
    ``check_split`` refuses layers that do not divide evenly over the stages, as Megatron does
    without a layout. ``fixed`` are regions that cannot be run again (``LayerGraph``).

    Raises:
        ConfigError: names the flag, its value and a value that works.
    """
    check_job(model, parallel, batch)
    if check_split and layout is None:
        _check_even(model, parallel)
    graph = replace(layer_graph(model, parallel, batch), fixed=fixed)
    if costs is None:
        if cluster is None:
            raise ConfigError("--cluster is missing; --cluster a100-40g-nvlink works, or --profile FILE")
        fused = (optimizer or Optimizer()).gradient_accumulation_fusion
        costs = estimate_costs(model, parallel, batch, cluster, fused=fused)
    elif costs.graph and costs.graph != graph.fingerprint():
        raise _other_layer(costs, layer_facts(model, parallel, batch))
    if memory_bytes is None:
        if cluster is None:
            raise ConfigError("--budget is missing; --budget 32GiB works")
        memory_bytes = cluster.budget_bytes
    elif cluster is not None and memory_bytes > cluster.device.memory_bytes:
        raise ConfigError(
            f"--budget {format_bytes(memory_bytes)} is more than a device of --cluster {cluster.name} "
            f"has; --budget {cluster.budget_bytes / 1024**3:.1f}GiB works"
        )
    job = Job(
        model=model,
        parallel=parallel,
        batch=batch,
        graph=graph.keeping(costs.kept_bytes),
        costs=costs,
        memory_bytes=memory_bytes,
        optimizer=optimizer or Optimizer(),
        layout=layout,
        cluster=cluster,
        counted=counted,
    )
    check_microbatches(parallel, job.microbatches)
    return job


def _other_layer(costs: CostTable, facts: Facts) -> ConfigError:
    """The error that ``costs`` are not those of a layer with these facts."""
    different = differing(costs.job, facts) if costs.job else ""
    return ConfigError(
        f"--profile: the costs ({costs.source}) were measured for another layer shape"
        f"{different and ': ' + different}; `lynx profile` with this job's flags works"
    )


def _check_even(model: Model, parallel: Parallel) -> None:
    stages = parallel.pp * parallel.vpp
    if model.num_layers % stages == 0:
        return
    if model.num_layers % parallel.pp:
        works = max(p for p in range(1, parallel.pp) if model.num_layers % p == 0)
        flag, value, other = "--pp", parallel.pp, f"--pp {works}"
    else:
        per_rank = model.num_layers // parallel.pp
        works = max(v for v in range(1, parallel.vpp) if per_rank % v == 0)
        flag, value, other = "--vpp", parallel.vpp, f"--vpp {works}"
    raise ConfigError(
        f"{flag} {value} does not divide --num-layers {model.num_layers} into {stages} equal stages; "
        f"{other} works, or an uneven --layout"
    )
