"""What one transformer layer computes and saves: regions, storages, LayerGraph.

A *region* is a stretch of the layer's forward pass between two submodule boundaries; it is the
unit of recomputation. A *storage* is a block of memory; tensors that share one count once. Each
storage is produced by one region and read, in the backward pass, by the regions in ``saved_by``.
Storages that no backward reads exist too: they pass from one region to the next and matter when
a region is run again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

INPUT = "input"
"""The pseudo-region that produces the layer's input. Only ``full-uniform-g`` plans drop it: it is
rebuilt by running the end of the layer before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory that a region produces.

    ``saved_by`` names the regions whose backward reads it, in forward order; empty when it only
    passes from region to region.
    """

    name: str
    producer: str
    size_bytes: int
    saved_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A stretch of the forward pass.

    ``reads`` are the storages that must be at hand to run it again. A region that depends on
    random state and shapes alone (a dropout mask) reads nothing. ``communicates`` marks a region
    that issues a tensor-parallel collective when it runs; ``draws`` one that uses random state.
    """

    name: str
    reads: tuple[str, ...] = ()
    communicates: bool = False
    draws: bool = False


@dataclass(frozen=True, slots=True)
class _Index:
    """What a graph looks up, made once: planners ask for it ten thousand times in a millisecond's work."""

    place: dict[str, int]
    storage: dict[str, Storage]
    made: dict[str, tuple[Storage, ...]]
    readers: dict[str, tuple[str, ...]]
    phase: dict[str, int]
    need: dict[str, int | None]
    latest: dict[str, int]
    release: dict[str, int]

    @classmethod
    def of(cls, regions: tuple[Region, ...], storages: tuple[Storage, ...], cuts: tuple[str, ...]) -> _Index:
        """The index of a graph's parts."""
        place = {region.name: i for i, region in enumerate(regions)}
        phase = {name: sum(place[name] <= place[cut] for cut in cuts) for name in place}
        made: dict[str, tuple[Storage, ...]] = {}
        readers: dict[str, tuple[str, ...]] = {}
        for one in storages:
            made[one.producer] = (*made.get(one.producer, ()), one)
        for region in regions:
            for read in region.reads:
                readers[read] = (*readers.get(read, ()), region.name)
        need: dict[str, int | None] = {}
        latest: dict[str, int] = {}
        release: dict[str, int] = {}
        for name in reversed(place):
            asking = [phase[r] for one in made.get(name, ()) for r in one.saved_by]
            need[name] = min(asking, default=None)
            again = [latest[r] for one in made.get(name, ()) for r in readers.get(one.name, ())]
            latest[name] = min(asking) if asking else max(again, default=0)
            for one in made.get(name, ()):
                last = [phase[r] for r in one.saved_by] + [latest[r] for r in readers.get(one.name, ())]
                release[one.name] = max(last, default=0)
        storage = {one.name: one for one in storages}
        return cls(place, storage, made, readers, phase, need, latest, release)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """Regions in forward order and the storages between them.

    A layer's backward falls into *phases*, over each of which memory is counted as one: ``cuts``
    names, in backward order, the regions with whose backward the second phase begins, the third,
    and so on. ``fixed`` are regions that are kept whatever a planner would like: what runs there cannot
    be run again.

    Raises:
        ValueError: a name twice, an unknown name, a region that reads what comes later, or cuts out
            of order.
    """

    regions: tuple[Region, ...]
    storages: tuple[Storage, ...]
    cuts: tuple[str, ...] = ()
    fixed: frozenset[str] = frozenset()
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Region names in forward order."""
    _index: _Index = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = {region.name: i for i, region in enumerate(self.regions)}
        made = {storage.name: storage for storage in self.storages}
        object.__setattr__(self, "names", tuple(order))
        if len(order) != len(self.regions) or len(made) != len(self.storages):
            raise ValueError("a region or storage name stands twice in the graph")
        for storage in self.storages:
            for name in (storage.producer, *storage.saved_by):
                if name not in order:
                    raise ValueError(f"storage {storage.name} names an unknown region {name}")
        for region in self.regions:
            for read in region.reads:
                if read not in made or order[made[read].producer] >= order[region.name]:
                    raise ValueError(f"region {region.name} cannot read {read}: it comes later")
        places = [order.get(cut, -1) for cut in self.cuts]
        if any(place < 0 for place in places) or any(a <= b for a, b in pairwise(places)):
            raise ValueError(f"cuts {self.cuts} are not regions in backward order")
        object.__setattr__(self, "_index", _Index.of(self.regions, self.storages, self.cuts))

    def region(self, name: str) -> Region:
        """The region called ``name``; ``KeyError`` if there is none."""
        return self.regions[self._index.place[name]]

    def storage(self, name: str) -> Storage:
        """The storage called ``name``; ``KeyError`` if there is none."""
        return self._index.storage[name]

    def produced_by(self, region: str) -> tuple[Storage, ...]:
        """The storages that ``region`` produces."""
        return self._index.made.get(region, ())

    def readers(self, storage: str) -> tuple[str, ...]:
        """The regions that need ``storage`` to run again."""
        return self._index.readers.get(storage, ())

    def inputs_of(self, region: str) -> tuple[str, ...]:
        """The regions whose storages ``region`` needs to run again, in forward order."""
        made = {self.storage(read).producer for read in self.region(region).reads}
        return tuple(name for name in self.names if name in made)

    def droppable(self) -> tuple[str, ...]:
        """Regions with a storage that some backward reads, without the layer's input and what is fixed."""
        saved = {storage.producer for storage in self.storages if storage.saved_by} - {INPUT, *self.fixed}
        return tuple(name for name in self.names if name in saved)

    def phase_of(self, region: str) -> int:
        """The phase of a layer's backward in which ``region``'s own backward runs, from 0."""
        return self._index.phase[region]

    def first_need(self, region: str) -> int | None:
        """The first phase in which some backward reads what ``region`` makes; None if none does."""
        return self._index.need[region]

    def latest_phase(self, region: str) -> int:
        """The phase by whose end ``region`` has run again, whatever else is dropped: that of its
        first need, or if no backward reads what it makes, that of the regions which do."""
        return self._index.latest[region]

    def release_phase(self, storage: str) -> int:
        """The phase with whose end ``storage`` goes: when no backward and no region that may have to
        run again reads it any more."""
        return self._index.release[storage]

    def is_kept(self, storage: Storage, dropped: frozenset[str]) -> bool:
        """Whether ``storage`` stays in memory from forward to backward when ``dropped`` are.

        It stays if its producer is not dropped and somebody will need it: a backward, or a
        dropped region that is to run again from it.
        """
        if storage.producer in dropped:
            return False
        return bool(storage.saved_by) or any(reader in dropped for reader in self.readers(storage.name))

    def kept_bytes(self, dropped: Iterable[str] = ()) -> int:
        """Bytes that one layer holds per microbatch, its input included."""
        gone = frozenset(dropped)
        return sum(s.size_bytes for s in self.storages if self.is_kept(s, gone))

    def rebuilt_bytes(self, region: str, dropped: Iterable[str]) -> int:
        """Bytes that appear when the dropped ``region`` is rebuilt.

        Counts what a backward reads, and what other dropped regions need to run again.
        """
        gone = frozenset(dropped)
        return sum(
            s.size_bytes
            for s in self.produced_by(region)
            if s.saved_by or any(reader in gone for reader in self.readers(s.name))
        )

    def kept_by_region(self) -> dict[str, int]:
        """Bytes that one layer holds per microbatch if nothing is dropped, by the region that makes them."""
        return {n: sum(s.size_bytes for s in self.produced_by(n) if s.saved_by) for n in self.names}

    def keeping(self, kept_bytes: Mapping[str, int]) -> LayerGraph:
        """The graph with other sizes: what backwards read of a region in ``kept_bytes`` is so large in all.

        Only sums are known, so the region's largest storages that are read grow or shrink; where it has
        none, there is one more.
        """
        storages = list(self.storages)
        for name, wanted in kept_bytes.items():
            if name not in self._index.place:
                continue
            own = sorted(
                (i for i, one in enumerate(storages) if one.producer == name and one.saved_by),
                key=lambda i: storages[i].size_bytes,
                reverse=True,
            )
            missing = wanted - sum(storages[i].size_bytes for i in own)
            for i in own:
                size = max(0, storages[i].size_bytes + missing)
                missing -= size - storages[i].size_bytes
                storages[i] = replace(storages[i], size_bytes=size)
            if missing:
                storages.append(
                    Storage(name=f"{name}.more", producer=name, size_bytes=missing, saved_by=(name,))
                )
        return replace(self, storages=tuple(storages)) if kept_bytes else self

    def fingerprint(self) -> str:
        """A hash that changes with any region, storage or size."""
        return hashlib.sha256(repr((self.regions, self.storages)).encode()).hexdigest()[:16]
