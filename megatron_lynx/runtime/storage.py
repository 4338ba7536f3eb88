"""TapeStorage: one block of memory that a plan drops, and SavedTensor: a view of one.

References go one way, from what was saved later to what was made earlier: a tensor that autograd saved
holds its storage, a storage that is absent holds the run which can make it again, a run holds the storages
that it reads. So memory goes by reference count, at its last use, and nothing of a step needs Python's
collector of cycles.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lynx.graph import INPUT


class Maker(Protocol):
    """What can make an absent storage again."""

    def rebuild_for(self, storage: TapeStorage) -> None:
        """Give ``storage`` its memory back."""


class TapeStorage:
    """A storage that the plan drops, or of a span a tensor that autograd saved: when all of the span runs
    again, what is saved at the same ordinal is that tensor.

    Attributes:
        label: the plan's name of what produced it; a region, or the mask drawn inside one.
        maker: the run that makes it again; None once it is there.
        data: a tensor on the memory, or None while it is dropped and not rebuilt.
    """

    __slots__ = ("__weakref__", "data", "label", "maker")

    def __init__(self, label: str, maker: Maker) -> None:
        self.label = label
        self.maker: Maker | None = maker
        self.data: torch.Tensor | None = None

    def fill(self, data: torch.Tensor) -> None:
        """Take memory back, by a tensor on it outside any graph; what made it is not needed any more."""
        self.data, self.maker = data, None

    def restore(self) -> torch.Tensor:
        """The tensor on the memory; rebuilt first if it is absent."""
        if self.data is None and self.maker is not None:
            self.maker.rebuild_for(self)
        if self.data is None:
            raise AssertionError(f"{self.label} was not rebuilt")  # a run that ends without it raises
        return self.data


Known = tuple[TapeStorage, StorageWeakRef]
"""A dropped storage and a weak reference to the memory: while that lives, the address cannot be given to
another storage, so a match is never a mistake."""


class SavedTensor:
    """A tensor by its storage and geometry; ``restore`` makes it again once the data is there."""

    __slots__ = ("dtype", "offset", "requires_grad", "size", "storage", "stride")

    def __init__(self, storage: TapeStorage, tensor: torch.Tensor) -> None:
        self.storage = storage
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.requires_grad = tensor.requires_grad

    def restore(self) -> torch.Tensor:
        """The tensor, on its storage's data, outside any autograd graph; rebuilt first if it is absent."""
        data = self.storage.restore()
        with torch._C.DisableTorchFunction():
            if data.dtype is self.dtype:
                return data.as_strided(self.size, self.stride, self.offset)
            tensor = torch.empty(0, dtype=self.dtype, device=data.device)
            return tensor.set_(data.untyped_storage(), self.offset, self.size, self.stride)

    def hollow(self, device: torch.device) -> torch.Tensor:
        """A tensor of this geometry with arbitrary content."""
        with torch._C.DisableTorchFunction():
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


def unpack(saved: Any) -> Any:
    """Called by autograd when a backward needs what ``pack`` returned (Rule 4)."""
    return saved if isinstance(saved, torch.Tensor) else saved.restore()


class _Nobody:
    """Stands where no run is."""

    def rebuild_for(self, storage: TapeStorage) -> None:
        """Nothing to do."""


NOTHING = TapeStorage(INPUT, _Nobody())
"""The storage of hollow arguments, which are never restored."""
