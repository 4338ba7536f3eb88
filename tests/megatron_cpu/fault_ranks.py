"""Runs inside ranks: many command lines of Megatron's trainer in one launch, each trained or refused."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass
class Found:
    """What one command line did on one rank.

    ``losses`` and ``gradients`` (hashes of all gradients that go into the optimizer) have one entry a step;
    ``peak_bytes`` is of the second step's schedule; ``error`` is the type and the text of what ended the
    run, ``printed`` what the rank wrote.
    """

    losses: list[Any] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    error: str = ""
    printed: str = ""


def train(rank: int, world_size: int, payload: list[list[str]]) -> list[Found]:
    """Run Megatron's trainer with each argument list."""
    return [run(argv) for argv in payload]


def train_adapters(rank: int, world_size: int, payload: list[list[str]]) -> list[Found]:
    """``train``, of adapters in an otherwise frozen model."""
    from megatron.core.models.gpt import GPTModel

    from tests.support.frozen import freeze

    build = GPTModel.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        freeze(self, "adapters")

    with mock.patch.object(GPTModel, "__init__", built):
        return train(rank, world_size, payload)


def run(argv: list[str]) -> Found:
    """One run."""
    from megatron.training import training

    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.recorder import ENVIRONMENT_VARIABLE, recorder_if_requested
    from megatron_lynx.integration.trainer import lynx_trainer

    found, printed = Found(), io.StringIO()
    _groups_for(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with (
                mock.patch.dict(os.environ, {ENVIRONMENT_VARIABLE: folder}),
                contextlib.suppress(SystemExit),
                contextlib.redirect_stdout(printed),
                mock.patch.object(training, "finalize_model_grads", hashed(found.gradients)),
                recorder_if_requested(),
                lynx_trainer(),
            ):
                pretrain.train(pretrain.parse(argv))
        except Exception as error:  # a fault is what is looked for
            found.error = f"{type(error).__name__}: {error}"
            found.printed = traceback.format_exc()
        for path in Path(folder).glob("*.jsonl"):
            steps = [json.loads(line) for line in path.read_text().splitlines()]
            found.losses = [step["loss"] for step in steps]
            found.peak_bytes = max((step["peak_bytes"] or 0 for step in steps), default=0)
    with (
        mock.patch.object(training, "destroy_model_parallel"),
        mock.patch.object(training, "destroy_global_memory_buffer"),
    ):
        training.destroy_global_state()
    found.printed += printed.getvalue()
    return found


def _groups_for(argv: list[str]) -> None:
    """Megatron's process groups are made anew only for other sizes: each keeps threads that poll for as long
    as the process lives, and a thousand of them leave little time for anything else."""
    from megatron.core import parallel_state

    flags = ("parallel-size", "virtual", "pipeline-model-parallel-layout", "shards")
    sizes = [pair for pair in pairwise(argv) if pair[0][:2] == "--" and any(f in pair[0] for f in flags)]
    if _sizes and _sizes[-1] != sizes and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    _sizes.append(sizes)


_sizes: list[list[tuple[str, ...]]] = []
"""The sizes of the command lines that ran in this process; the last ones are in force."""


def hashed(gradients: list[str]) -> Callable[..., None]:
    """Megatron's reduction of gradients; hashes what comes out, every bit of it."""
    from megatron.core.distributed import finalize_model_grads

    def finalize(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
        finalize_model_grads(chunks, *args, **kwargs)
        found = hashlib.sha256()
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad:
                    continue
                found.update(name.encode() + parameter.main_grad.numpy().tobytes())
        gradients.append(found.hexdigest())

    return finalize


def touched(rank: int, world_size: int, payload: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What measuring a small model of each set of options changes of what a training step relies on; and, as
    ``costs``, which weight gradients and gathers took time."""
    return [_touched(options) for options in payload]


def _touched(options: dict[str, Any]) -> dict[str, Any]:
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.utils import unwrap_model

    from megatron_lynx.integration.measuring.memory import measured_costs
    from megatron_lynx.spec import Batch, Model, Parallel
    from tests.support import small_gpt

    fired: list[str] = []
    found: dict[str, Any] = {}

    @contextlib.contextmanager
    def around(wrapped: list[Any]) -> Any:
        chunks = unwrap_model(wrapped)
        modules = [m for chunk in chunks for m in chunk.modules()]
        for module in modules:
            name = type(module).__name__
            module.counter = torch.nn.Buffer(torch.zeros(1))
            # Below hooks too: what a module counts in its own forward.
            _counting(module)
            module.register_forward_pre_hook(lambda *_, name=name: fired.append(f"before {name}"))
            module.register_forward_hook(lambda *_, name=name: fired.append(f"after {name}"))
            module.register_full_backward_hook(lambda *_, name=name: fired.append(f"backward {name}"))
        for parameter in (p for chunk in chunks for p in chunk.parameters() if p.requires_grad):
            parameter.register_hook(lambda grad: fired.append("gradient"))
            parameter.main_grad.fill_(3.0)
        everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: fired.append("any"))
        before = [_state(m) for m in modules]
        random = (torch.get_rng_state(), dict(get_cuda_rng_tracker().get_states()))
        model = Model(
            num_layers=small_gpt.LAYERS,
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=64,
            dtype_bytes=4,
            transformer_impl="local",
        )
        parallel = Parallel(tp=2, sequence_parallel=options.get("sequence_parallel", False))
        batch = Batch(seq_length=small_gpt.SEQUENCE, micro_batch_size=2, global_batch_size=8)
        costs = measured_costs(chunks, model, parallel, batch).layer
        times = costs.wgrad_ns.items(), (o for o in costs.collective_ns.items() if o[0].endswith("gather"))
        found["costs"] = [sorted(name for name, took in some if took) for some in times]
        everywhere.remove()
        after = [_state(m) for m in modules]
        found["fired"] = sorted(set(fired))
        found["modules"] = [
            type(m).__name__ for m, a, b in zip(modules, before, after, strict=True) if a != b
        ]
        found["random"] = torch.equal(random[0], torch.get_rng_state()) and all(
            torch.equal(state, get_cuda_rng_tracker().get_states()[name]) for name, state in random[1].items()
        )
        found["gradients"] = all(
            not p.requires_grad or (bool((p.main_grad == 3.0).all()) and p.grad is None)
            for c in chunks
            for p in c.parameters()
        )
        yield lambda schedule: schedule

    small_gpt.train_small_gpt(steps=0, tp=2, around=around, **options)
    return found


def _counting(module: Any) -> None:
    """Let ``module`` count its own calls, in an attribute and in a buffer."""
    forward = module.forward
    module.calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        module.calls += 1
        module.counter.add_(1)
        return forward(*args, **kwargs)

    module.forward = counted


def _state(module: Any) -> dict[str, Any]:
    """A module's attributes: containers by what they hold, all else by identity; buffers by value."""
    import torch

    found: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        found[name] = {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)
    found["values"] = {n: b.flatten().tolist() for n, b in module.named_buffers(recurse=False)}
    found["mode"] = (module.training, module.calls)
    assert isinstance(module, torch.nn.Module)
    return found


def facts(rank: int, world_size: int, payload: list[list[str]]) -> list[dict[str, Any]]:
    """What a plan for each argument list is made for, as Megatron's parser and configuration resolve it."""
    import torch
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.training import destroy_global_state

    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.describe import batch_of, model_of, parallel_of
    from megatron_lynx.spec import job_facts

    found = []
    for argv in payload:
        args = pretrain.parse(argv)
        model = model_of(args, core_transformer_config_from_args(args), torch.device("cpu"))
        found.append(dict(job_facts(model, parallel_of(args), batch_of(args))))
        destroy_global_state()
    return found
