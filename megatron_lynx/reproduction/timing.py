"""Times of arXiv 2205.05198: one calibration, then Table 4 and the model rows as predictions.

The calibration: the share of the peak rate that GEMMs reach is set so that one layer of the 22B
model without recomputation and without sequence parallelism takes the printed 19.6 ms, forward and
backward together. That is one number fitted to one number; every other figure of the device and
its links stays as in ``configs/clusters/a100-80g-nvlink.toml``, except that the runs had twice as
many network links as that file assumes (``paper_cluster``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_lynx.estimate import estimate_costs
from megatron_lynx.hardware import Cluster
from megatron_lynx.layers import kind_of
from megatron_lynx.layers.kind import Work
from megatron_lynx.planner.baselines import SELECTIVE
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.reproduction.published import MODEL_ROWS, SEQUENCE, TABLE_4, LayerRow, ModelRow
from megatron_lynx.search.workflow import make_job, plan_job
from megatron_lynx.spec import Batch, Model, Parallel

PRESET = "a100-80g-nvlink"
LINKS = 2
"""The preset's network has four HDR links for eight devices; the runs had one for each (recalled)."""

CALIBRATED_ON = TABLE_4[0]
"""The row whose total the calibration is fitted to."""

TOLERANCE = 0.10
"""Relative error within which a prediction counts as a reproduction."""


def paper_model(name: str) -> Model:
    """A model as those runs had it: unfused attention with dropout, a causal softmax kernel that
    needs no mask tensor."""
    return load_model(name, transformer_impl="local", attention="unfused", mask_from_data=True)


def paper_cluster() -> Cluster:
    """The preset with the network of the runs, before calibration."""
    cluster = load_cluster(PRESET)
    rate = LINKS * cluster.network.bytes_per_second
    return replace(cluster, network=replace(cluster.network, bytes_per_second=rate))


def with_efficiency(cluster: Cluster, gemm_efficiency: float) -> Cluster:
    """The cluster with another share of the peak for GEMMs."""
    return replace(cluster, device=replace(cluster.device, gemm_efficiency=gemm_efficiency))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibrated cluster: the efficiency before and after, and what it was fitted to."""

    cluster: Cluster
    preset_efficiency: float
    gemm_efficiency: float
    target_ns: int
    before_ns: int
    after_ns: int


def calibrate(cluster: Cluster | None = None) -> Calibration:
    """Fit the GEMM efficiency, to four digits, by bisection: the layer's time falls as it grows."""
    cluster = cluster or paper_cluster()
    target = round(CALIBRATED_ON.total.value * 1e6)
    low, high = 0.2, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        longer = _bare_layer_ns(with_efficiency(cluster, middle)) > target
        low, high = (middle, high) if longer else (low, middle)
    fitted = with_efficiency(cluster, round(high, 4))
    return Calibration(
        cluster=fitted,
        preset_efficiency=cluster.device.gemm_efficiency,
        gemm_efficiency=fitted.device.gemm_efficiency,
        target_ns=target,
        before_ns=_bare_layer_ns(cluster),
        after_ns=_bare_layer_ns(fitted),
    )


def _layer_shape(sequence_parallel: bool) -> tuple[Model, Parallel, Batch]:
    """One layer of the 22B model as Table 4 runs it."""
    row = MODEL_ROWS[0]
    batch = Batch(seq_length=SEQUENCE, micro_batch_size=row.micro_batch_size, global_batch_size=4)
    parallel = Parallel(tp=row.tp, sequence_parallel=sequence_parallel)
    return replace(paper_model(row.model), num_layers=1), parallel, batch


def _bare_layer_ns(cluster: Cluster) -> int:
    layer = estimate_costs(*_layer_shape(CALIBRATED_ON.sequence_parallel), cluster).layer
    return layer.layer_forward_ns + layer.layer_backward_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Predicted times of one row of Table 4; ``backward_ns`` holds ``recompute_ns``."""

    row: LayerRow
    forward_ns: int
    backward_ns: int
    recompute_ns: int

    @property
    def total_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns

    def errors(self) -> dict[str, float]:
        """Relative errors of forward, backward and their sum."""
        pairs = {
            "forward": (self.forward_ns, self.row.forward),
            "backward": (self.backward_ns, self.row.backward),
            "total": (self.total_ns, self.row.total),
        }
        return {name: ns / 1e6 / figure.value - 1 for name, (ns, figure) in pairs.items()}


def layer_times(row: LayerRow, cluster: Cluster) -> LayerTimes:
    """Predict a row of Table 4: plan a model of that one layer, and read off its recomputation."""
    planned = plan_job(make_job(*_layer_shape(row.sequence_parallel), cluster=cluster), row.method)
    layer = planned.job.costs.layer
    again = planned.stages[0].report.exposed_ns
    return LayerTimes(
        row=row,
        forward_ns=layer.layer_forward_ns,
        backward_ns=layer.layer_backward_ns + again,
        recompute_ns=again,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Predicted steps of one model row; the full one is None where the paper prints none.

    ``peak_bytes`` is the most loaded device's, with selective recomputation.
    """

    row: ModelRow
    full_ns: int | None
    present_ns: int
    peak_bytes: int
    memory_bytes: int

    def errors(self) -> dict[str, float]:
        """Relative errors of the two steps, and of the gain (as a ratio of step times)."""
        found = {"selective + SP": self.present_ns / 1e9 / self.row.present_s.value - 1}
        if self.full_ns is not None and self.row.full_s is not None:
            found["full"] = self.full_ns / 1e9 / self.row.full_s.value - 1
            published = self.row.full_s.value / self.row.present_s.value
            found["gain"] = self.full_ns / self.present_ns / published - 1
        return found


def step_times(row: ModelRow, cluster: Cluster) -> StepTimes:
    """Predict the steps of a model row by planning and simulating them whole."""
    present = _step(row, cluster, "selective", sequence_parallel=True)
    return StepTimes(
        row=row,
        full_ns=_step(row, cluster, "full-uniform-1", sequence_parallel=False)[0] if row.full_s else None,
        present_ns=present[0],
        peak_bytes=present[1],
        memory_bytes=cluster.budget_bytes,
    )


def _step(row: ModelRow, cluster: Cluster, method: str, *, sequence_parallel: bool) -> tuple[int, int]:
    """(step, bytes of the fullest device)."""
    job = make_job(
        paper_model(row.model),
        Parallel(tp=row.tp, pp=row.pp, vpp=row.vpp, dp=row.dp, sequence_parallel=sequence_parallel),
        Batch(
            seq_length=SEQUENCE,
            micro_batch_size=row.micro_batch_size,
            global_batch_size=row.global_batch_size,
        ),
        cluster=cluster,
    )
    planned = plan_job(job, method)
    return planned.iteration_ns, max(stage.peak_bytes for stage in planned.row().stages)


def model_flops(model: Model, batch: Batch) -> int:
    """FLOPs of a step without recomputation: 72BLsh^2 (1 + s/6h + v/(12hL)), appendix A.

    Written out so that it stays whole: B(72Lsh^2 + 12Ls^2h + 6shv).
    """
    s, h, layers = batch.seq_length, model.hidden_size, model.num_layers
    one = 72 * layers * s * h * h + 12 * layers * s * s * h + 6 * s * h * model.vocab_size
    return batch.global_batch_size * one


def mfu(row: ModelRow, step_ns: float, cluster: Cluster) -> float:
    """Model FLOPs utilisation of a step: useful FLOPs over what the devices could have done."""
    batch = Batch(
        seq_length=SEQUENCE, micro_batch_size=row.micro_batch_size, global_batch_size=row.global_batch_size
    )
    able = cluster.device.flops_per_second * row.gpus * step_ns / 1e9
    return model_flops(paper_model(row.model), batch) / able


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlops:
    """FLOPs of one layer's kernels for one microbatch on one rank."""

    forward: int
    backward: int
    attention: int


def layer_flops(model: Model, parallel: Parallel, batch: Batch) -> LayerFlops:
    """Counted from the kernels of the estimate."""

    def count(work: Work) -> int:
        return sum(kernel.flops for kernels in work.values() for kernel in kernels)

    kind = kind_of(model)
    work = kind.work(model, parallel, batch)
    attention = {name: work.forward[name] for name in kind.recompute_modules[SELECTIVE]}
    return LayerFlops(
        forward=count(work.forward),
        backward=count(work.dgrad) + count(work.wgrad),
        attention=count(attention),
    )


def forward_flops(model: Model, parallel: Parallel, batch: Batch) -> int:
    """The paper's count of one layer's forward: 24bsh^2 (1 + s/6h) / t, appendix A."""
    s, b, h = batch.seq_length, batch.micro_batch_size, model.hidden_size
    return (24 * b * s * h * h + 4 * b * s * s * h) // parallel.tp
