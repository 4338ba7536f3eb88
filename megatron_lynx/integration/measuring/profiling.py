"""``lynx profile`` on one rank: Megatron builds the model, its costs are measured, and that is all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_args

from megatron_lynx.cost import CostTable
from megatron_lynx.integration import pretrain
from megatron_lynx.integration.cpu.backend import cpu_backend_if_requested
from megatron_lynx.integration.cpu.dataset_helpers import shipped_dataset_helpers
from megatron_lynx.integration.cpu.norm import sequence_parallel_norm
from megatron_lynx.integration.describe import batch_of, model_of, parallel_of
from megatron_lynx.integration.install import install
from megatron_lynx.integration.measuring.memory import measured_costs
from megatron_lynx.integration.targets import Target
from megatron_lynx.integration.trainer import argument_targets
from megatron_lynx.integration.windows import Hooks


class _Measured(Exception):  # noqa: N818 (it is not an error)
    """Leaves Megatron's trainer once the model is built and measured."""


def profile(arguments: Sequence[str], output: Path) -> CostTable:
    """Measure on every rank of the job that Megatron's ``arguments`` describe; rank 0 writes
    ``output``. Run it under torchrun with as many ranks as will train.

    Raises:
        ConfigError: an argument is wrong; names it.
    """
    found: list[CostTable] = []

    def setup(original: Callable[..., Any], _: Hooks) -> Callable[..., Any]:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            chunks = unwrap_model(original(*args, **kwargs)[0])
            flags = get_args()
            device = next(chunks[0].parameters()).device
            model = model_of(flags, get_model_config(chunks[0]), device)
            found.append(measured_costs(chunks, model, parallel_of(flags), batch_of(flags)))
            raise _Measured

        return setup_model_and_optimizer

    # Patched where the trainer uses it: after it there is a model, and nothing is trained yet.
    target = Target("megatron.training.training.setup_model_and_optimizer", setup)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_backend_if_requested())
        stack.enter_context(sequence_parallel_norm())
        stack.enter_context(shipped_dataset_helpers())
        stack.enter_context(install(Hooks(), (target, *argument_targets())))
        stack.enter_context(contextlib.suppress(_Measured))
        pretrain.train(pretrain.parse(arguments))
    table = found[0]
    if torch.distributed.get_rank() == 0:
        output.write_text(table.to_json())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return table
