"""What a pipeline rank holds besides the activations of its layers: what is static, and what is there at
one moment only.

Everything is in bytes on one rank. A rank's peak is the largest sum over the moments of a step: what is
static, the activations that are alive, and what the moment itself needs. The moments are the phases of a
layer's backward (``LayerKind.workspace_bytes``), the *head* (the final norm, the logits, the loss and its
backward, on the last stage), the backward of the *embedding* (first stage), and the optimizer's *step*.

Sizes are those that Megatron-Core 0.19 allocates: ``distributed/param_and_grad_buffer.py``,
``optimizer/distrib_optimizer.py``, ``tensor_parallel/{cross_entropy,layers}.py``,
``fusions/fused_cross_entropy.py``. ``lynx truth`` holds them against what GPUs measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

from megatron_lynx.estimate import padded_vocabulary
from megatron_lynx.graph import LayerGraph
from megatron_lynx.hardware import Cluster
from megatron_lynx.layers import kind_of
from megatron_lynx.layers.kind import LayerKind
from megatron_lynx.layers.storages import rows_of
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel
from megatron_lynx.units import MIB

FP32 = 4
INDEX = 8
"""Bytes of a token's or a position's number."""

RESERVED = 1.07
"""What torch's allocator reserves for what is allocated at the peak: at most that in SimuMax's runs on
B200 (``docs/b200/b200_release_v1.2_summary.json``: 1.02 to 1.07). ``reserve_gib`` of a cluster is for it."""
MATMUL_WORKSPACE = 32 * MIB
"""What cuBLAS keeps for each thread that calls it; a step has two, the forward's and autograd's. It is
torch's default from Hopper on, and what ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` asks for on any device
(deterministic runs need that); older devices take 8 MiB by default (``CUDABlas.cpp``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What is alive at one moment only.

    ``head_bytes`` from the final norm to the end of the output layer's backward (last stage),
    ``embedding_bytes`` in the embedding's backward, when the layers' activations of that microbatch are
    gone (first stage), ``step_bytes`` in the optimizer's step, when there are no activations at all.
    """

    head_bytes: int = 0
    embedding_bytes: int = 0
    step_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Static memory of one rank by owner, and what its moments need besides.

    ``weights_bytes``, ``gradients_bytes``, ``main_params_bytes`` (the optimizer's copy of the weights)
    and ``optimizer_bytes`` (Adam's moments, which the first step makes at its end) belong to the
    parameters. ``embedding_bytes`` is what the embedding saves for each microbatch in flight (first
    stage). ``buffers_bytes``: gathers of sequence parallelism, the scores of unfused attention,
    activations and gradients that are on their way to a neighbour. ``library_bytes``: workspaces of the
    libraries that multiply matrices.
    """

    parameters: int
    weights_bytes: int
    gradients_bytes: int
    main_params_bytes: int
    optimizer_bytes: int
    embedding_bytes: int
    buffers_bytes: int
    library_bytes: int
    moments: Moments

    @property
    def static_bytes(self) -> int:
        """The sum of all owners."""
        return sum(size for _, size in self.owners())

    @property
    def between_steps_bytes(self) -> int:
        """What is there between two steps: all that is static but what microbatches in flight save, and
        the copies that the optimizer's step made, which go when the next one begins."""
        return self.static_bytes - self.embedding_bytes + self.moments.step_bytes

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
    output layer, which is a copy of the embedding if the two are tied and the stages differ. A layer of
    multi-token prediction is there too, with a projection of two hidden rows to one, three norms more, and
    the embedding.
    """
    embedding = padded_vocabulary(model, parallel) // parallel.tp * model.hidden_size
    count = layers * kind_of(model).parameters(model, parallel.tp)
    if first:
        count += embedding + _position_parameters(model)
    if last:
        count += model.norm_parameters
        if not first or model.untie_embeddings_and_output_weights:
            count += embedding
        own = 2 * model.hidden_size * model.hidden_size // parallel.tp + 3 * model.norm_parameters
        count += model.mtp_num_layers * (kind_of(model).parameters(model, parallel.tp) + own)
        if model.mtp_num_layers and not first:
            count += _position_parameters(model)
            count += embedding if model.untie_embeddings_and_output_weights else 0
    return count


def _position_parameters(model: Model) -> int:
    if model.position_embedding_type != "learned_absolute":
        return 0
    return (model.max_position_embeddings or 0) * model.hidden_size


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
    optimizer: Optimizer | None = None,
    te_workspace_bytes: int = 32 * MIB,
    counted: tuple[int, int] | None = None,
) -> Footprint:
    """Memory of rank ``stage`` when it holds ``layers`` layers.

    ``in_flight`` counts the microbatches whose embedding is alive on the first stage;
    ``te_workspace_bytes`` is what Transformer Engine keeps for its matrix products. ``counted`` are the
    rank's parameters and how many of them train, where a real model was counted.
    """
    optimizer = optimizer or Optimizer()
    first, last = stage == 0, stage == parallel.pp - 1
    count = stage_parameters(model, parallel, layers, first=first, last=last)
    count, trained = counted or (count, count)
    buffered = _padded(trained, parallel, optimizer)
    kept = count - trained + (buffered if optimizer.use_distributed_optimizer else trained)
    shard = -(-buffered // optimizer.shards(parallel.dp * parallel.cp))
    state = optimizer.state_bytes * shard
    main = optimizer.main_param_bytes(model) * shard
    gradient = optimizer.gradient_bytes(model)
    return Footprint(
        parameters=count,
        weights_bytes=model.dtype_bytes * kept,
        gradients_bytes=gradient * buffered,
        main_params_bytes=round(main * optimizer.on_device),
        optimizer_bytes=round(state * optimizer.on_device),
        embedding_bytes=in_flight * _embedded_bytes(model, parallel, batch) if first else 0,
        buffers_bytes=_buffers_bytes(model, parallel, batch, optimizer, ends=first or last),
        library_bytes=_library_bytes(model, te_workspace_bytes),
        moments=Moments(
            head_bytes=head_bytes(model, parallel, batch) if last else 0,
            embedding_bytes=embedding_bytes(model, parallel, batch) if first else 0,
            step_bytes=_step_bytes(model, optimizer, shard),
        ),
    )


def _padded(count: int, parallel: Parallel, optimizer: Optimizer) -> int:
    """Elements of the gradient buffers: with the distributed optimizer each bucket is padded so that it
    can be split, and so that the split is aligned (``pad_bucket_end``); without an overlap of the
    reduction there is one bucket."""
    if not optimizer.use_distributed_optimizer:
        return count
    ranks = parallel.dp * parallel.cp
    split = ranks * 128
    bucket = max(40_000_000, 1_000_000 * ranks) if optimizer.overlap_grad_reduce else count
    return count + -(-count // max(1, bucket)) * (split // 2) if count % split else count


def _step_bytes(model: Model, optimizer: Optimizer, shard: int) -> int:
    """Gradients in 16 bits are copied to fp32 for the step, unless the optimizer reads them as they are."""
    copied = optimizer.gradient_bytes(model) < FP32 and not optimizer.use_precision_aware_optimizer
    return FP32 * shard if copied else 0


def _embedded_bytes(model: Model, parallel: Parallel, batch: Batch) -> int:
    """Token and position indices and the mask of the embedding's dropout."""
    rows = rows_of(parallel, batch)
    mask = rows * model.hidden_size * model.mask_bytes if model.hidden_dropout else 0
    return mask + 2 * INDEX * parallel.tokens(batch)


def embedding_bytes(model: Model, parallel: Parallel, batch: Batch) -> int:
    """The gradient of the embedding's rows and of the positions, each as large as its weight, and the
    incoming gradient (gathered, with sequence parallelism)."""
    e, tokens = model.dtype_bytes, parallel.tokens(batch)
    rows = padded_vocabulary(model, parallel) // parallel.tp * model.hidden_size
    return e * (rows + _position_parameters(model) + tokens * model.hidden_size)


def head_bytes(model: Model, parallel: Parallel, batch: Batch) -> int:
    """What the head needs: the final norm's input and output, and the larger of two moments.

    The loss: logits, and what ``_loss_bytes`` says. The output layer's backward: the logits' gradient,
    that of its input, and that of its weight before it is added to the buffer. The batch's own mask and
    indices are alive with the loss. Layers of multi-token prediction run here, and keep what they save.
    """
    e, tokens = model.dtype_bytes, parallel.tokens(batch)
    vocabulary = padded_vocabulary(model, parallel) // parallel.tp
    hidden = rows_of(parallel, batch) * model.hidden_size * e
    whole = tokens * model.hidden_size * e
    mask = batch.micro_batch_size * batch.seq_length**2 if model.mask_from_data else 0
    loss = tokens * vocabulary * _loss_bytes(model) + mask + 4 * INDEX * tokens
    backward = e * vocabulary * (tokens + model.hidden_size) + whole
    if not model.mtp_num_layers:
        return 2 * hidden + max(loss, backward)
    layer = max(kind_of(model).workspace_bytes(model, parallel, batch))
    predictions = model.mtp_num_layers * _prediction_bytes(model, parallel, batch)
    return 2 * hidden + max(loss, backward, layer) + predictions


def _prediction_bytes(model: Model, parallel: Parallel, batch: Batch) -> int:
    """What one layer of multi-token prediction keeps (``multi_token_prediction.py``): all that a layer does,
    its input twice more (the embedded token and what is projected, two rows wide), its output before and
    after its norm, the mask of the embedding's dropout, and what its loss saves of the logits."""
    rows = rows_of(parallel, batch)
    tokens, vocabulary = parallel.tokens(batch), padded_vocabulary(model, parallel)
    te = model.cross_entropy_loss_fusion and model.cross_entropy_fusion_impl == "te"
    logits = tokens * vocabulary // parallel.tp * (model.dtype_bytes if te else FP32)
    hidden = rows * model.hidden_size * model.dtype_bytes
    mask = rows * model.hidden_size * model.mask_bytes if model.hidden_dropout else 0
    return kind_of(model).graph(model, parallel, batch).kept_bytes() + 5 * hidden + mask + logits


def _loss_bytes(model: Model) -> int:
    """Bytes for each logit while the loss is computed: the logits, and a copy in fp32 on which Megatron's
    cross entropy works in place. Its fused form (``native``) holds one more, Transformer Engine's works on
    the logits themselves."""
    copy = FP32 if model.dtype_bytes < FP32 else 0
    if not model.cross_entropy_loss_fusion:
        return model.dtype_bytes + copy
    return model.dtype_bytes + (copy + FP32 if model.cross_entropy_fusion_impl == "native" else 0)


def _buffers_bytes(
    model: Model, parallel: Parallel, batch: Batch, optimizer: Optimizer, *, ends: bool
) -> int:
    """Megatron's global buffer (the gathered input of a linear, the scores of its own attention: the
    larger, they share a name), what is sent and received, and stand-ins for gradients.

    With gradient accumulation in the GEMM, Transformer Engine returns for each weight a tensor of its
    shape instead of a gradient, and keeps one for each shape (``get_dummy_wgrad``).
    """
    e, tokens = model.dtype_bytes, parallel.tokens(batch)
    te = model.transformer_impl == "transformer_engine"
    gathered = tokens * model.hidden_size * e if parallel.sequence_parallel else 0
    heads = model.num_attention_heads // parallel.tp
    scores = tokens * batch.seq_length * heads * e if model.attention == "unfused" and not te else 0
    size = max(gathered, scores)
    if te and optimizer.gradient_accumulation_fusion:
        size += e * _each_shape_once(model, parallel.tp)
    if parallel.pp > 1:
        size += rows_of(parallel, batch) * model.hidden_size * e * (2 if ends else 4)
    return size


@lru_cache(maxsize=256)
def _each_shape_once(model: Model, tp: int) -> int:
    """Elements of a layer's linears on one rank, each shape counted once."""
    one = Batch(seq_length=tp, micro_batch_size=1, global_batch_size=1)
    shapes = set(weight_shapes(kind_of(model), model, Parallel(tp=tp), one).values())
    return sum(rows * columns for rows, columns in shapes)


def _library_bytes(model: Model, te_workspace_bytes: int) -> int:
    if model.device == "cpu":
        return 0
    te = model.transformer_impl == "transformer_engine"
    return 2 * MATMUL_WORKSPACE + (te_workspace_bytes if te else 0)


def weight_shapes(
    kind: LayerKind, model: Model, parallel: Parallel, batch: Batch
) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each linear of a layer on one rank."""
    found = {}
    for region, kernels in kind.work(model, parallel, batch).wgrad.items():
        for kernel in kernels:
            if kernel.gemm is not None:
                found[region] = kernel.gemm[:2]
    return found


def weight_gradient_bytes(
    graph: LayerGraph, model: Model, parallel: Parallel, batch: Batch, optimizer: Optimizer
) -> tuple[int, ...]:
    """The largest gradient of a weight in each phase of a layer's backward, before it is added to the
    buffer. None with Transformer Engine where the GEMM adds it itself; Megatron's own linear returns an
    empty tensor of its size even then."""
    found = [0] * (len(graph.cuts) + 1)
    if model.transformer_impl == "transformer_engine" and optimizer.gradient_accumulation_fusion:
        return tuple(found)
    for region, (rows, columns) in weight_shapes(kind_of(model), model, parallel, batch).items():
        phase = graph.phase_of(region)
        found[phase] = max(found[phase], rows * columns * model.dtype_bytes)
    return tuple(found)


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
    model: Model,
    parallel: Parallel,
    cluster: Cluster,
    optimizer: Optimizer,
    *,
    forward_ns: int = 0,
    backward_ns: int = 0,
) -> int:
    """Time of a rank between its last backward and the next step: gradients are reduced over the
    data-parallel group (reduce-scatter and all-gather of weights with the distributed optimizer), their
    norm is taken and they are clipped, then Adam reads and writes its state once. The device waits for the
    host meanwhile: the norm has to be known there, and the next step's first kernels are yet to come.

    With ``overlap_grad_reduce`` buckets are reduced while the last microbatch's backward (``backward_ns``)
    makes the others; what is left is the last bucket, or what the backward is too short for. With
    ``overlap_param_gather`` the first forward hides the gather likewise.
    """
    dp = parallel.dp * parallel.cp
    link = cluster.data_link(parallel.tp, dp)
    gradients, share = optimizer.gradient_bytes(model) * parameters, parameters
    buckets = max(1, parameters // max(40_000_000, 1_000_000 * dp))
    if optimizer.use_distributed_optimizer:
        reduce_ns = link.gather_ns(gradients, dp)
        gather_ns = link.gather_ns(model.dtype_bytes * parameters, dp)
        share = -(-parameters // optimizer.shards(dp))
    else:
        reduce_ns, gather_ns = link.all_reduce_ns(gradients, dp), 0
    if optimizer.overlap_grad_reduce:
        reduce_ns = max(reduce_ns // buckets, reduce_ns - backward_ns)
    if optimizer.overlap_param_gather:
        gather_ns = max(gather_ns // buckets, gather_ns - forward_ns)
    moved = share * (2 * 3 * FP32 + FP32 + model.dtype_bytes)
    clipped = share * 3 * FP32
    work_ns = cluster.device.compute_ns(0, moved) + cluster.device.compute_ns(0, clipped)
    return reduce_ns + gather_ns + work_ns + (cluster.host.step_ns if cluster.host else 0)
