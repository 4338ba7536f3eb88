"""The names in Megatron and torch that are replaced while megatron_lynx is installed.

One row each: the dotted path *where it is used*, the parameters that were tested, and what takes
its place. ``install`` checks every row before it changes anything.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_lynx.errors import InstallError
from megatron_lynx.integration.windows import (
    Hooks,
    windowed_batched_p2p,
    windowed_collective,
    windowed_p2p,
)

Replace = Callable[[Callable[..., Any], Hooks], Callable[..., Any]]

_P2P = (
    "tensor_send_prev",
    "tensor_recv_prev",
    "tensor_send_next",
    "tensor_recv_next",
    "group",
    "prev_pipeline_rank",
    "next_pipeline_rank",
)
_GATHER = ("output_tensor", "input_tensor", "group", "async_op")
_SCATTER = ("output", "input", "op", "group", "async_op")


@dataclass(frozen=True, slots=True)
class Target:
    """A name to replace. ``parameters`` are the names of its parameters, in order."""

    path: str
    parameters: tuple[str, ...]
    replace: Replace

    def locate(self) -> tuple[Any, str, Callable[..., Any]]:
        """The module, the attribute and the object that stands there now.

        Raises:
            InstallError: it is missing, or its parameters differ from the tested ones.
        """
        module_name, _, name = self.path.rpartition(".")
        try:
            module = importlib.import_module(module_name)
            found: Callable[..., Any] = getattr(module, name)
        except (ImportError, AttributeError) as error:
            raise InstallError(f"{self.path} is missing: {error}; megatron-core 0.19 has it") from error
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != self.parameters:
            raise InstallError(
                f"{self.path} takes ({', '.join(parameters)}), not ({', '.join(self.parameters)}); "
                "megatron-core 0.19 with torch 2.8 to 2.14 works"
            )
        return module, name, found


TARGETS = (
    # Forward reductions of the local spec, and the input gradient's in the backward.
    Target("torch.distributed.all_reduce", ("tensor", "op", "group", "async_op"), windowed_collective),
    # Sequence parallelism: row-parallel outputs forward, their gradients backward.
    Target("megatron.core.tensor_parallel.mappings.dist_all_gather_func", _GATHER, windowed_collective),
    Target("megatron.core.tensor_parallel.mappings.dist_reduce_scatter_func", _SCATTER, windowed_collective),
    # Sequence parallelism: column-parallel inputs, forward and backward.
    Target("megatron.core.tensor_parallel.layers.dist_all_gather_func", _GATHER, windowed_collective),
    Target("megatron.core.tensor_parallel.layers.dist_reduce_scatter_func", _SCATTER, windowed_collective),
    # Pipeline transfers of every schedule.
    Target("megatron.core.pipeline_parallel.p2p_communication._batched_p2p_ops", _P2P, windowed_batched_p2p),
    Target("megatron.core.pipeline_parallel.p2p_communication._p2p_ops", _P2P, windowed_p2p),
)
