"""Megatron's ``--fine-grained-activation-offloading`` (megatron-core 0.19) as a method of a comparison.

What it does: a hook takes every tensor of at least ``--min-offloaded-tensor-size`` elements that is saved in
the forward of a module of ``--offload-modules``. Behind the module all of them are copied to pinned memory of
the host on a stream of their own; a module's reload starts when the backward of the same module one layer
later is done, and its own backward waits for it. ``--activation-offload-fraction`` leaves the last of a
model chunk's modules on the device. It demands Transformer Engine, in whose layers the norms are none of
its modules, and of a dense MLP it moves nothing. It goes with ``--recompute-modules``; beside full
recomputation Megatron does not document it, and it is not modelled.

The model: a job like the one at hand, planned as any other, in which

- of a tensor that only modules on the host have saved, the fraction is not kept; one that a part on the
  device has saved too is copied all the same and frees nothing;
- one layer's share of what is copied is back on the device during the backward, one layer ahead;
- a layer's forward is no shorter than the copies to the host, its backward no shorter than those from it.
  (Megatron's forward may run ahead of its copies; then what waits to be copied stays on the device, and
  warm-up forwards, one behind the other, pile it up. ``--fine-grained-offloading-max-inflight-offloads 1``
  makes it wait, as here.)

Where there is a choice, it is in Megatron's favour: each GPU has its link to the host for itself, in both
directions at once; copies slow down nothing else, neither kernels nor collectives on the same PCIe; their
launches cost no time; the fraction is spread evenly over the layers; the host has memory enough. Left out is
what changes next to nothing: the last layer of the last stage, which Megatron keeps on the device, and
``--delta-offload-bytes-across-pp-ranks``, by which later stages keep more of their first microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from megatron_lynx.errors import InfeasibleError
from megatron_lynx.graph import LayerGraph, Storage
from megatron_lynx.job import Job
from megatron_lynx.layers import kind_of
from megatron_lynx.plan import fingerprint
from megatron_lynx.planner.baselines import SELECTIVE, module_sets, modules_of
from megatron_lynx.search.planned import Planned, assemble
from megatron_lynx.search.splits import given_split
from megatron_lynx.search.stages import StagePlans

OFFLOAD = "offload"
"""The best way to offload: modules, fraction, and modules that are recomputed beside it."""

LEAST_ELEMENTS = 1 << 20
"""Megatron's default of ``--min-offloaded-tensor-size``. Elements are counted as if all were of the model's
type."""

PARTS = 10
"""In how many parts the fraction is tried."""

_NEEDS = {"attn_proj": "core_attn"}
"""What a module may not be offloaded without: its input is read by the other's backward."""

_UNLIMITED = 1 << 59


@dataclass(frozen=True, slots=True)
class Offload:
    """``modules`` of which ``parts`` tenths go to the host, beside the planner ``recompute``.

    Its text is the name of the planner in rows and plans.
    """

    modules: tuple[str, ...]
    parts: int = PARTS
    recompute: str = "none"

    def __str__(self) -> str:
        again = f"-modules-{'+'.join(modules_of(self.recompute))}" if modules_of(self.recompute) else ""
        return f"{OFFLOAD}-{'+'.join(self.modules)}-{self.parts / PARTS:g}{again}"


def offload_flags(planner: str) -> str:
    """Megatron's flags for the planner of an offload row; nothing for another one."""
    if not planner.startswith(f"{OFFLOAD}-"):
        return ""
    modules, fraction = planner.split("-")[1:3]
    again = " ".join(modules_of(planner))
    return (
        f"--fine-grained-activation-offloading --offload-modules {' '.join(modules.split('+'))} "
        f"--activation-offload-fraction {fraction} --fine-grained-offloading-max-inflight-offloads 1"
        + (f" --recompute-granularity selective --recompute-modules {again}" if again else "")
    )


def why_not(job: Job) -> str | None:
    """Why a job has no figures for offloading; None if it has."""
    kind = kind_of(job.model)
    if not kind.offload_modules:
        return f"{OFFLOAD}: Megatron demands --transformer-impl transformer_engine, not {kind.name}"
    if job.cluster is None or not job.cluster.device.host_bytes_per_second:
        where = f"the file of --cluster {job.cluster.name}" if job.cluster else "a profile"
        return (
            f"{OFFLOAD}: {where} says nothing of the link to the host's memory; "
            "device.host_gb_s in a cluster file does, for example host_gb_s = 25"
        )
    return None


def ways(job: Job) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
    """Each planner that may recompute beside offloading, and the sets of modules that go with it."""
    kind = kind_of(job.model)
    names = list(kind.offload_modules)
    sets = [found for size in range(1, len(names) + 1) for found in combinations(names, size)]
    sets = [found for found in sets if all(_NEEDS.get(name, name) in found for name in found)]
    for planner in ("none", "selective", *module_sets(kind.recompute_modules)):
        again = SELECTIVE in modules_of(planner)  # then its own tensors are not there to be copied
        yield planner, tuple(found for found in sets if not (again and SELECTIVE in found))


def offloaded(job: Job, way: Offload) -> Job:
    """The job as it is with ``way`` (which recomputes nothing by itself)."""
    if job.cluster is None:
        return job
    kind = kind_of(job.model)
    again = {region for module in modules_of(way.recompute) for region in kind.recompute_modules[module]}
    moving = [set(kind.offload_modules[module]) for module in way.modules]
    large = [
        storage
        for storage in job.graph.storages
        if storage.producer not in again and storage.size_bytes // job.model.dtype_bytes >= LEAST_ELEMENTS
    ]
    copied = sum(s.size_bytes for regions in moving for s in large if regions & set(s.saved_by))
    share = copied * way.parts // PARTS
    gone = {s.name for s in large if _frees(s, job.graph, set[str]().union(*moving), again)}
    storages = tuple(
        replace(s, size_bytes=s.size_bytes - s.size_bytes * way.parts // PARTS) if s.name in gone else s
        for s in job.graph.storages
    )
    layer, out = job.costs.layer, kind.output
    transfer_ns = -(-share * 10**9 // job.cluster.device.host_bytes_per_second)
    forward = max(0, transfer_ns - layer.layer_forward_ns)
    recomputed_ns = sum(layer.forward_ns.get(region, 0) for region in again)
    backward = max(0, transfer_ns - layer.layer_backward_ns - recomputed_ns)
    slower = replace(
        layer,
        forward_ns={**layer.forward_ns, out: layer.forward_ns.get(out, 0) + forward},
        dgrad_ns={**layer.dgrad_ns, out: layer.dgrad_ns.get(out, 0) + backward},
    )
    workspace = tuple(size + share for size in job.workspace_bytes)
    return replace(
        job,
        graph=replace(job.graph, storages=storages),
        costs=replace(job.costs, layer=slower, workspace_bytes=workspace),
    )


def _frees(storage: Storage, graph: LayerGraph, hosted: set[str], again: set[str]) -> bool:
    """Whether nothing on the device holds ``storage`` once ``hosted`` regions have given theirs away."""
    readers = set(graph.readers(storage.name)) & again
    return bool(storage.saved_by) and hosted.issuperset(storage.saved_by) and not readers


def best_offload(bench: StagePlans) -> Planned:
    """The fastest way to offload that fits all stages of the job's own split, in as few parts as fit.

    Raises:
        InfeasibleError: none fits; of the one that lacks least. There are no figures: needs 0 bytes.
    """
    job, errors = bench.job, list[InfeasibleError]()
    best: Planned | None = None
    if reason := why_not(job):
        raise InfeasibleError(reason, stage=0, budget_bytes=job.memory_bytes, needed_bytes=0)
    roomy = StagePlans(replace(job, memory_bytes=_UNLIMITED), bench.options, bench.time_limit_s)
    floors = [(assemble(roomy, way[0], given_split(job)).iteration_ns, *way) for way in ways(job)]
    for floor_ns, planner, sets in sorted(floors):
        if best is not None and best.iteration_ns <= floor_ns:
            break
        for modules in sets:
            if bench.over() and (best or errors):
                break
            try:
                one = _fewest_parts(bench, modules, planner)
            except InfeasibleError as error:
                errors.append(error)
                continue
            if best is None or one.iteration_ns < best.iteration_ns:
                best = one
    if best is None:
        raise min(errors, key=lambda error: error.needed_bytes)
    return best


def _fewest_parts(bench: StagePlans, modules: tuple[str, ...], recompute: str) -> Planned:
    """Offloading of ``modules``, as little of it as fits.

    Raises:
        InfeasibleError: not even all of it is enough.
    """
    best, low, high = planned_way(bench, Offload(modules, PARTS, recompute)), 1, PARTS
    while low < high and not bench.over():
        middle = (low + high) // 2
        try:
            best, high = planned_way(bench, Offload(modules, middle, recompute)), middle
        except InfeasibleError:
            low = middle + 1
    return best


def planned_way(bench: StagePlans, way: Offload) -> Planned:
    """The job of ``bench`` planned with one way to offload, on its own split.

    Raises:
        InfeasibleError: it does not fit.
    """
    job = bench.job
    own = StagePlans(offloaded(job, way), bench.options, bench.time_limit_s)
    planned = assemble(own, way.recompute, given_split(job))
    mark = fingerprint(job.model, job.parallel, job.batch, job.graph)
    return replace(planned, plan=replace(planned.plan, planner=str(way), fingerprint=mark))
