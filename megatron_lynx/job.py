"""Job: everything that planning needs to know about a training run, checked as a whole.

A job is a model, its parallel sizes and batch, the costs of its operations, and the memory that
training may take on a device. Costs are estimated from a cluster or measured (``CostTable``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError
from megatron_lynx.estimate import estimate_costs, host_costs
from megatron_lynx.footprint import Footprint, footprint, step_ns, weight_gradient_bytes
from megatron_lynx.graph import LayerGraph
from megatron_lynx.hardware import Cluster
from megatron_lynx.layers import kind_of, layer_graph
from megatron_lynx.schedule import check_microbatches, in_flight
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel, check_job, differing, layer_facts
from megatron_lynx.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training run. Make it with ``make_job``, which checks what holds for the whole.

    ``memory_bytes`` is what training may take on one device, static memory included. ``layout`` is
    Megatron's ``--pipeline-model-parallel-layout`` where the user gave one. Without a ``cluster``
    (costs measured in place) the optimizer's step counts as free.
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
) -> Job:
    """Put a job together.

    ``costs`` replace the estimate; ``memory_bytes`` replaces what the cluster's devices offer.
    ``check_split`` refuses layers that do not divide evenly over the stages, as Megatron does
    without a layout.

    Raises:
        ConfigError: names the flag, its value and a value that works.
    """
    check_job(model, parallel, batch)
    if check_split and layout is None:
        _check_even(model, parallel)
    graph = layer_graph(model, parallel, batch)
    if costs is None:
        if cluster is None:
            raise ConfigError("--cluster is missing; --cluster a100-40g-nvlink works, or --profile FILE")
        fused = (optimizer or Optimizer()).gradient_accumulation_fusion
        costs = estimate_costs(model, parallel, batch, cluster, fused=fused)
    elif costs.graph and costs.graph != graph.fingerprint():
        different = differing(costs.job, layer_facts(model, parallel, batch)) if costs.job else ""
        raise ConfigError(
            f"--profile: the costs ({costs.source}) were measured for another layer shape"
            f"{different and ': ' + different}; `lynx profile` with this job's flags works"
        )
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
    )
    check_microbatches(parallel, job.microbatches)
    return job


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
