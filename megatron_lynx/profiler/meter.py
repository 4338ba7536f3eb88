"""Counts the bytes of the tensors that a piece of a program makes: one meter for every method.

The meter sees every operator of torch, in the forward and in the backward pass, and follows each
storage that an operator creates until it is freed. What existed before (weights, gradient buffers,
optimizer state) is not counted, nor are the kernels' own scratch buffers. So the peak over the
forward and backward passes of one iteration is the peak of the activations, together with the
temporaries of the layer at work and with what was rebuilt.

torch's ``MemTracker`` counts alike but sorts by module and by forward or backward pass: what a
method rebuilds in the backward pass would be a "temporary" there, and methods could not be compared.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside ``with StorageMeter() as meter`` every new storage is counted while it lives.

    It slows a program down (each operator runs some Python), so time and meter different iterations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        # Storages by the identity of torch's own object; a freed one leaves before its id is reused.
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {_identity(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if _identity(tensor) not in before:  # else a view, or written in place
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or size == 0:
            return
        self._live[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
