"""TapeStorage: one block of memory as a tape knows it, and SavedTensor: a view of one.

A storage is recognised by its address while a weak reference to it is held: as long as the weak
reference lives the address cannot be given to another storage, so a match is never a mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from megatron_lynx.runtime.region import RegionRun


class TapeStorage:
    """A storage that a region produced, or the layer's input.

    Attributes:
        label: the plan's name of what produced it; a region, or the dropout inside one.
        run: the region's run that can rebuild it; None for the input of a stage.
        dropped: whether the plan drops it.
        data: the memory, or None while it is dropped and not rebuilt.
        pending: saved tensors of the autograd graph that still have to be unpacked.
        readers: runs of dropped regions that need it to run again.
    """

    __slots__ = ("_weak", "address", "data", "dropped", "label", "pending", "readers", "run", "size_bytes")

    def __init__(
        self, storage: torch.UntypedStorage, label: str, run: RegionRun | None, dropped: bool
    ) -> None:
        self.label = label
        self.run = run
        self.dropped = dropped
        self.data: torch.UntypedStorage | None = None
        self.pending = 0
        self.readers: list[RegionRun] = []
        self.size_bytes = storage.nbytes()
        self.address = storage._cdata
        self._weak: object = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Hold the memory, unless the plan drops it."""
        if not self.dropped and self.data is None:
            self.data = storage

    def wanted(self) -> bool:
        """Whether anything will still read it: a backward, or a region that must run again."""
        return self.pending > 0 or any(run.wanted() for run in self.readers)

    def release_if_done(self) -> None:
        """Free the memory after its last use (Rule 6)."""
        if self.data is not None and not self.wanted():
            self.data = None

    def forget_address(self) -> None:
        """Drop the weak reference once the layer's forward is over; ``address`` means nothing then."""
        self._weak = None
        self.address = 0


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
        """The tensor, on its storage's data, outside any autograd graph."""
        data = self.storage.data
        assert data is not None
        tensor = torch.empty(0, dtype=self.dtype, device=data.device)
        return tensor.set_(data, self.offset, self.size, self.stride)

    def hollow(self, device: torch.device) -> torch.Tensor:
        """A tensor of this geometry with arbitrary content."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
