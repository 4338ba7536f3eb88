"""The names in Megatron and torch that are replaced while megatron_lynx is installed.

One row each: the dotted path *where it is used*, and what takes its place. ``install`` checks every
row before it changes anything; the parameters that were tested are those of ``versions.NAMES``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_lynx.errors import InstallError
from megatron_lynx.integration import versions
from megatron_lynx.integration.binding import inner_functions
from megatron_lynx.integration.parameters import keeping_parameters
from megatron_lynx.integration.windows import (
    Hooks,
    watched_inside,
    windowed_batched_p2p,
    windowed_collective,
    windowed_p2p,
    windowed_shapes,
)

Replace = Callable[[Callable[..., Any], Hooks], Callable[..., Any]]

_LAYERS = "megatron.core.tensor_parallel.layers"


@dataclass(frozen=True, slots=True)
class Target:
    """A name to replace; ``path`` is a row of ``versions.NAMES``."""

    path: str
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
            raise InstallError(f"{self.path} is missing: {error}; found {versions.summary()}") from error
        versions.check_parameters(self.path, found)
        return module, name, found


TARGETS = (
    # Forward reductions of the local spec, and the input gradient's in the backward.
    Target("torch.distributed.all_reduce", windowed_collective),
    # Sequence parallelism: row-parallel outputs forward, their gradients backward.
    Target("megatron.core.tensor_parallel.mappings.dist_all_gather_func", windowed_collective),
    Target("megatron.core.tensor_parallel.mappings.dist_reduce_scatter_func", windowed_collective),
    # Sequence parallelism: column-parallel inputs, forward and backward.
    Target("megatron.core.tensor_parallel.layers.dist_all_gather_func", windowed_collective),
    Target("megatron.core.tensor_parallel.layers.dist_reduce_scatter_func", windowed_collective),
    # The same of Transformer Engine, which looks them up when it calls.
    Target("torch.distributed.all_gather_into_tensor", windowed_collective),
    Target("torch.distributed.reduce_scatter_tensor", windowed_collective),
    # A linear's backward that marks its weight must find the Parameter.
    Target(f"{_LAYERS}.LinearWithGradAccumulationAndAsyncCommunication", keeping_parameters),
    # Pipeline transfers of every schedule.
    Target("megatron.core.pipeline_parallel.p2p_communication._batched_p2p_ops", windowed_batched_p2p),
    Target("megatron.core.pipeline_parallel.p2p_communication._p2p_ops", windowed_p2p),
    Target("megatron.core.pipeline_parallel.schedules.P2PCommunicator", windowed_shapes),
)


def inner_targets() -> tuple[Target, ...]:
    """Functions that run inside parts of layers, as far as the packages that have them are loaded."""
    return tuple(
        Target(path, watched_inside(names))
        for path, names in inner_functions().items()
        if path.partition(".")[0] in sys.modules
    )
