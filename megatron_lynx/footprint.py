"""What a pipeline rank holds besides the activations of its layers: static memory, by owner.

Everything is in bytes on one rank. Sizes per parameter are those of Megatron's mixed-precision
Adam, as in its own ``theoretical_memory_usage.py``: 18 bytes, or 6 + 12/DP with the distributed
optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatron_lynx.estimate import padded_vocabulary
from megatron_lynx.graph import LayerGraph
from megatron_lynx.hardware import Cluster
from megatron_lynx.layers import kind_of
from megatron_lynx.spec import Batch, Model, Parallel

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Static memory of one rank.

    ``weights_bytes``, ``gradients_bytes`` and ``optimizer_bytes`` belong to the parameters.
    ``embedding_bytes`` is what the embedding saves for each microbatch in flight (first stage),
    ``logits_bytes`` the output layer's working set of one microbatch (last stage),
    ``buffers_bytes`` the communication buffers: gathers of sequence parallelism, activations and
    gradients that are on their way to a neighbour.
    """

    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    embedding_bytes: int
    logits_bytes: int
    buffers_bytes: int

    @property
    def static_bytes(self) -> int:
        """The sum of all owners."""
        return sum(size for _, size in self.owners())

    def owners(self) -> tuple[tuple[str, int], ...]:
        """(owner, bytes) pairs, for a table."""
        return tuple(
            (field.name.removesuffix("_bytes"), getattr(self, field.name))
            for field in fields(self)
            if field.name.endswith("_bytes")
        )


def stage_parameters(model: Model, parallel: Parallel, layers: int, *, first: bool, last: bool) -> int:
    """Parameters of a rank with ``layers`` layers.

    The first stage adds the embedding's shard and the positions, the last the final norm and the
    output layer, which is a copy of the embedding if the two are tied and the stages differ.
    """
    embedding = padded_vocabulary(model, parallel) // parallel.tp * model.hidden_size
    count = layers * kind_of(model).parameters(model, parallel.tp)
    if first:
        count += embedding
        if model.position_embedding_type == "learned_absolute":
            count += (model.max_position_embeddings or 0) * model.hidden_size
    if last:
        count += model.norm_parameters
        if not first or model.untie_embeddings_and_output_weights:
            count += embedding
    return count


def total_parameters(model: Model, parallel: Parallel | None = None) -> int:
    """Parameters of the whole model, tied weights counted once."""
    tp = parallel.tp if parallel else 1
    whole = Parallel(tp=tp)
    matrices = stage_parameters(model, Parallel(), model.num_layers, first=True, last=True)
    padding = padded_vocabulary(model, whole) - padded_vocabulary(model, Parallel())
    copies = 2 if model.untie_embeddings_and_output_weights else 1
    return matrices + padding * copies * model.hidden_size


def footprint(
    model: Model,
    parallel: Parallel,
    batch: Batch,
    *,
    stage: int,
    layers: int,
    in_flight: int,
    distributed_optimizer: bool = False,
) -> Footprint:
    """Static memory of rank ``stage`` when it holds ``layers`` layers.

    ``in_flight`` counts the microbatches whose embedding is alive on the first stage.
    """
    first, last = stage == 0, stage == parallel.pp - 1
    count = stage_parameters(model, parallel, layers, first=first, last=last)
    e, tp = model.dtype_bytes, parallel.tp
    tokens = batch.seq_length * batch.micro_batch_size
    rows = tokens // tp if parallel.sequence_parallel else tokens
    hidden = rows * model.hidden_size * e
    adam = 2 * FP32 + (FP32 if e < FP32 else 0)
    state = adam * count
    if distributed_optimizer:
        state = -(-state // parallel.dp)
    buffers = tokens * model.hidden_size * e if parallel.sequence_parallel else 0
    if parallel.pp > 1:
        buffers += hidden * (2 if first or last else 4)
    return Footprint(
        parameters=count,
        weights_bytes=count * e,
        gradients_bytes=count * FP32,
        optimizer_bytes=state,
        embedding_bytes=in_flight * _embedding_bytes(model, batch, rows) if first else 0,
        logits_bytes=_logits_bytes(model, parallel, tokens, hidden) if last else 0,
        buffers_bytes=buffers,
    )


def _embedding_bytes(model: Model, batch: Batch, rows: int) -> int:
    """Token and position indices (8 bytes each) and the mask of the embedding's dropout."""
    mask = rows * model.hidden_size * model.mask_bytes if model.hidden_dropout else 0
    return mask + 2 * 8 * batch.seq_length * batch.micro_batch_size


def _logits_bytes(model: Model, parallel: Parallel, tokens: int, hidden: int) -> int:
    """Logits, their softmax in fp32 and one more fp32 copy while either is computed; the final
    norm's input and output."""
    logits = tokens * padded_vocabulary(model, parallel) // parallel.tp
    return logits * (model.dtype_bytes + 2 * FP32) + 2 * hidden


def phase_workspaces(graph: LayerGraph, backward: Mapping[str, int]) -> tuple[int, ...]:
    """What each phase needs beyond what is saved when it begins, from the regions' working sets.

    A region that runs late in its phase may use what those before it have left.
    """
    place = {name: i for i, name in enumerate(graph.names)}
    found = [0] * (len(graph.cuts) + 1)
    for region, size in backward.items():
        phase = graph.phase_of(region)
        left = sum(
            s.size_bytes
            for s in graph.storages
            if s.saved_by
            and graph.release_phase(s.name) == phase
            and all(place[reader] > place[region] for reader in s.saved_by)
        )
        found[phase] = max(found[phase], size - left)
    return tuple(found)


def step_ns(
    parameters: int,
    parallel: Parallel,
    cluster: Cluster,
    *,
    distributed_optimizer: bool,
    dtype_bytes: int = 2,
) -> int:
    """Time of a rank between its last backward and the next step: gradients are reduced over the
    data-parallel group in fp32 (reduce-scatter and all-gather of weights with the distributed
    optimizer), then Adam reads and writes its state once.

    Overlapping the reduction with the backward is not modelled: it is the same for all plans.
    """
    link, dp = cluster.data_link(parallel.tp, parallel.dp), parallel.dp
    share = parameters
    if distributed_optimizer:
        reduce_ns = link.gather_ns(FP32 * parameters, dp) + link.gather_ns(dtype_bytes * parameters, dp)
        share = -(-parameters // dp)
    else:
        reduce_ns = link.all_reduce_ns(FP32 * parameters, dp)
    moved = share * (2 * 3 * FP32 + FP32 + dtype_bytes)
    return reduce_ns + cluster.device.compute_ns(0, moved)
