"""GlueSite: runs the code of a parent module between two of its submodules again.

The parent's own forward is called with the submodules shadowed on the instance: those before the glue
answer from memory, the one after it ends the replay. Module hooks of the submodules see nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from megatron_lynx.errors import TapeError
from megatron_lynx.layers.kind import Glue
from megatron_lynx.runtime.quiet import without_hooks, without_traces


class Meeting(Protocol):
    """What a site asks: the executor, whose ``active`` is the replay that runs."""

    active: Any


class _Answer(torch.nn.Module):
    """Stands for a submodule while glue runs again. Everything but calls goes to the real one."""

    def __init__(self, name: str, glue: Glue, real: torch.nn.Module, host: Meeting) -> None:
        super().__init__()
        object.__setattr__(self, "_asked", (name, glue, host))
        object.__setattr__(self, "_real", real)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, glue, host = self._asked
        return host.active.meet(name, glue, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_real"), name)


class GlueSite:
    """Where one glue of one layer runs.

    ``asked`` are the parts that answer from memory.

    Args:
        glue: the part.
        parent: its parent module.
        forward: the parent's own forward, below what is wrapped around it.
        submodules: by name of the part, the attribute of the parent and the module there, of every submodule
            that the parent calls up to ``glue.before``.
        host: the executor.
        quietly: a context without the ranges that Megatron's forward opens for profilers, which a replay
            that ends in the middle would leave open.
    """

    def __init__(
        self,
        glue: Glue,
        parent: torch.nn.Module,
        forward: Callable[..., Any],
        submodules: Mapping[str, tuple[str, torch.nn.Module]],
        host: Meeting,
        quietly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.glue = glue
        self._forward = forward
        self._parent = parent
        self._quietly = quietly
        stood_for = {id(module) for _, module in submodules.values()}
        self._inside = [m for m in parent.modules() if m is not parent and id(m) not in stood_for]
        self.asked = tuple(name for name in submodules if name != glue.before)
        self._answers = {
            attribute: _Answer(name, glue, module, host) for name, (attribute, module) in submodules.items()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's forward on its own arguments; the replay ends it from within.

        Raises:
            TapeError: the parent came to its end without calling the submodule after the glue.
        """
        with self._quietly(), without_traces((self._parent,)), without_hooks(self._inside):
            vars(self._parent).update(self._answers)
            self._forward(*args, **kwargs)
        raise TapeError(f"{self.glue.parent} did not call {self.glue.before} when {self.glue.name} ran again")
