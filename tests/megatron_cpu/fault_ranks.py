"""Runs inside ranks: many command lines of Megatron's trainer in one launch, each trained or refused."""

from __future__ import annotations

import contextlib
import hashlib
import io
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


@dataclass
class Found:
    """What one command line did on one rank.

    ``losses`` and ``gradients`` (hashes of all gradients that go into the optimizer) have one entry a step;
    ``error`` is the type and the text of what ended it, ``printed`` what rank 0 wrote.
    """

    losses: list[Any] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    error: str = ""
    printed: str = ""


def train(rank: int, world_size: int, payload: list[list[str]]) -> list[Found]:
    """Run Megatron's trainer with each argument list."""
    return [run(argv) for argv in payload]


def run(argv: list[str], inside: Callable[[Any], Any] = lambda trainer: contextlib.nullcontext()) -> Found:
    """One run; ``inside`` makes a context around the training from lynx's trainer."""
    from megatron.training import training

    from megatron_lynx.integration import pretrain
    from megatron_lynx.integration.trainer import lynx_trainer

    found, printed = Found(), io.StringIO()
    step = training.train_step

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        loss = result[0].get("lm loss")
        found.losses.append(None if loss is None else float(loss))
        return result

    try:
        with (
            contextlib.suppress(SystemExit),
            contextlib.redirect_stdout(printed),
            mock.patch.object(training, "finalize_model_grads", _hashed(found.gradients)),
            mock.patch.object(training, "train_step", recorded),
            lynx_trainer() as trainer,
            inside(trainer),
        ):
            pretrain.train(pretrain.parse(argv))
    except Exception as error:  # a fault is what is looked for
        found.error = f"{type(error).__name__}: {error}"
        found.printed = traceback.format_exc()
    training.destroy_global_state()
    found.printed += printed.getvalue()
    return found


def _hashed(gradients: list[str]) -> Callable[..., None]:
    """Megatron's reduction of gradients; hashes what comes out, every bit of it."""
    from megatron.core.distributed import finalize_model_grads

    def finalize(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
        finalize_model_grads(chunks, *args, **kwargs)
        found = hashlib.sha256()
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                found.update(name.encode() + parameter.main_grad.numpy().tobytes())
        gradients.append(found.hexdigest())

    return finalize


def touched(rank: int, world_size: int, payload: None) -> dict[str, Any]:
    """What measuring a small model changes of what a training step relies on."""
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
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.register_hook(lambda grad: fired.append("gradient"))
            parameter.main_grad.fill_(3.0)
        everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: fired.append("any"))
        before = [_state(m) for m in modules]
        random = (torch.get_rng_state(), dict(get_cuda_rng_tracker().get_states()))
        model = Model(
            num_layers=small_gpt.LAYERS, hidden_size=32, num_attention_heads=4, vocab_size=64, dtype_bytes=4
        )
        parallel = Parallel(tp=2)
        batch = Batch(seq_length=small_gpt.SEQUENCE, micro_batch_size=2, global_batch_size=8)
        measured_costs(chunks, model, parallel, batch)
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
            bool((p.main_grad == 3.0).all()) and p.grad is None for c in chunks for p in c.parameters()
        )
        yield lambda schedule: schedule

    small_gpt.train_small_gpt(steps=0, tp=2, around=around)
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
