"""Times what a stage does besides its layers: the embedding, and the head with its loss.

The model chunk's own forward runs with its layers passed over, collectives included, on every rank
at the same time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_lynx.integration.binding import transformer_layers
from megatron_lynx.profiler.measure import REPEATS, WARMUP, synchronize
from megatron_lynx.spec import Batch, Model, Parallel


def layer_arguments(
    chunks: Sequence[Any], model: Model, batch: Batch, device: torch.device
) -> dict[str, Any]:
    """What the model passes to its layers beside the input: the causal mask, rotary embeddings."""
    s = batch.seq_length
    mask = None
    if model.mask_from_data:
        mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1)
    found: dict[str, Any] = {"attention_mask": mask}
    if model.position_embedding_type == "rope":
        rotary = next(m.rotary_pos_emb for c in chunks for m in c.modules() if hasattr(m, "rotary_pos_emb"))
        found["rotary_pos_emb"] = rotary(s)
    return found


@contextlib.contextmanager
def passing(chunks: Sequence[Any], seen: list[torch.Tensor]) -> Iterator[None]:
    """Inside, every layer returns its input; ``seen`` gets what each received."""

    def forward(hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        if not hidden_states.requires_grad:  # a frozen embedding's
            hidden_states = hidden_states.detach().requires_grad_()
        seen.append(hidden_states)
        return hidden_states, None

    layers = [layer for group in transformer_layers(chunks) for layer in group]
    for layer in layers:
        object.__setattr__(layer, "forward", forward)
    try:
        yield
    finally:
        for layer in layers:
            object.__delattr__(layer, "forward")


def ends_ns(chunks: Sequence[Any], model: Model, parallel: Parallel, batch: Batch) -> dict[str, int]:
    """``embedding_*_ns`` and ``head_*_ns`` of a cost table, for what this rank holds."""
    names = ("embedding_forward", "head_forward", "head_backward", "embedding_backward")
    times: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(WARMUP + REPEATS):
        torch.distributed.barrier()
        for chunk in chunks:
            for name, time_ns in run_ends(chunk, model, parallel, batch).items():
                times[name].append(time_ns)
    found = {f"{name}_ns": round(statistics.median(t[WARMUP:])) for name, t in times.items() if t}
    return {f"{name}_ns": found.get(f"{name}_ns", 0) for name in names}


def run_ends(chunk: Any, model: Model, parallel: Parallel, batch: Batch) -> dict[str, int]:
    """Times of one forward and backward pass through the ends of ``chunk``; nothing if it has none."""
    if not (chunk.pre_process or chunk.post_process):
        return {}
    device = next(chunk.parameters()).device
    b, s = batch.micro_batch_size, batch.seq_length // parallel.cp
    tokens = torch.zeros(b, s, dtype=torch.long, device=device)
    positions = torch.arange(s, device=device).expand(b, s)
    inputs: list[torch.Tensor] = []
    found = {}
    if not chunk.pre_process:
        rows = s // (parallel.tp if parallel.sequence_parallel else 1)
        weight = next(p for p in chunk.parameters() if p.is_floating_point())
        received = torch.randn(rows, b, model.hidden_size, dtype=weight.dtype, device=device)
        chunk.set_input_tensor(received.requires_grad_())
        inputs.append(received)  # what a chunk without layers passes on
    synchronize()
    start = time.perf_counter_ns()
    with passing([chunk], inputs):
        labels = tokens if chunk.post_process else None
        if chunk.pre_process and chunk.post_process:
            # Both ends in one pass: the embedding alone first, so that they can be told apart.
            chunk.embedding(input_ids=tokens, position_ids=positions)
            synchronize()
            found["embedding_forward"] = time.perf_counter_ns() - start
            start = time.perf_counter_ns()
        out = chunk(tokens, positions, None, labels=labels)
    synchronize()
    whole = time.perf_counter_ns() - start
    if chunk.pre_process and chunk.post_process:
        found["head_forward"] = max(0, whole - found["embedding_forward"])
    elif chunk.pre_process:
        found["embedding_forward"] = whole
    elif chunk.post_process:
        found["head_forward"] = whole
    return found | _backward(chunk, out, inputs[-1] if inputs else out)


def _backward(chunk: Any, out: torch.Tensor, hidden: torch.Tensor) -> dict[str, int]:
    """The backward of the head down to ``hidden``, then that of the embedding from there."""
    found = {}
    parameters = [p for p in chunk.parameters() if p.requires_grad]
    grad = torch.randn_like(hidden)
    if chunk.post_process:
        start = time.perf_counter_ns()
        loss = out.float().sum()
        parts = ("output_layer", "final", "mtp.")
        head = [p for name, p in chunk.named_parameters() if any(part in name for part in parts)]
        tied = chunk.shared_embedding_or_output_weight() if not head or chunk.pre_process else None
        wanted = [hidden, *head, *([] if tied is None else [tied])]
        unique = list({id(p): p for p in wanted if p.requires_grad}.values())
        grad = torch.autograd.grad(loss, unique, allow_unused=True, retain_graph=chunk.pre_process)[0]
        synchronize()
        found["head_backward"] = time.perf_counter_ns() - start
    if chunk.pre_process and hidden.grad_fn is not None:
        start = time.perf_counter_ns()
        torch.autograd.grad(hidden, parameters, grad, allow_unused=True)
        synchronize()
        found["embedding_backward"] = time.perf_counter_ns() - start
    return found
