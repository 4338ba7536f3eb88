"""Which storages of one microbatch are at hand while its passes run.

A storage stays until its last user is done. Its users are the backward passes of the regions in
``saved_by`` and the dropped regions that read it when they run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.plan import LayerPlan

Sized = tuple[str, int]
"""A storage's name and its size in bytes."""


class GraphIndex:
    """Look-ups of a LayerGraph that a walk over many layers needs, made once.

    ``saved[region]`` are the (storage, producer) pairs that its backward reads, ``reads[region]``
    those that its forward reads, ``makes[region]`` what it produces. ``last`` is the region whose
    output is the next layer's input.
    """

    def __init__(self, graph: LayerGraph) -> None:
        producer = {storage.name: storage.producer for storage in graph.storages}
        self.graph = graph
        self.names = tuple(name for name in graph.names if name != INPUT)
        self.last = self.names[-1] if self.names else INPUT
        self.makes: dict[str, tuple[Sized, ...]] = {
            name: tuple((s.name, s.size_bytes) for s in graph.storages if s.producer == name)
            for name in graph.names
        }
        self.saved = {
            name: tuple((s.name, s.producer) for s in graph.storages if name in s.saved_by)
            for name in graph.names
        }
        self.reads = {
            region.name: tuple((read, producer[read]) for read in region.reads) for region in graph.regions
        }
        self.communicates = {region.name: region.communicates for region in graph.regions}
        self.size = {storage.name: storage.size_bytes for storage in graph.storages}
        self._patterns: dict[frozenset[str], Pattern] = {}

    def pattern(self, dropped: frozenset[str]) -> Pattern:
        """What dropping ``dropped`` means for one layer; made once per set."""
        found = self._patterns.get(dropped)
        if found is None:
            found = self._patterns[dropped] = _pattern(self, dropped)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One layer with a set of dropped regions.

    ``kept_bytes`` per producing region: what its forward leaves behind. ``uses`` counts the users
    of each storage, ``present`` are the storages at hand after the forward, ``aimless`` the
    dropped regions that are run again although nobody needs what they make.
    """

    dropped: frozenset[str]
    kept_bytes: Mapping[str, int]
    uses: Mapping[str, int]
    present: frozenset[str]
    aimless: tuple[str, ...]


def _pattern(index: GraphIndex, dropped: frozenset[str]) -> Pattern:
    graph = index.graph
    uses = {
        s.name: len(s.saved_by)
        + sum(1 for region in graph.regions if region.name in dropped and s.name in region.reads)
        for s in graph.storages
    }
    kept: dict[str, int] = {}
    present = set()
    for s in graph.storages:
        if s.producer not in dropped and uses[s.name]:
            present.add(s.name)
            kept[s.producer] = kept.get(s.producer, 0) + s.size_bytes
    aimless = tuple(
        name
        for name in graph.names
        if name in dropped and not any(uses[storage] for storage, _ in index.makes[name])
    )
    return Pattern(dropped=dropped, kept_bytes=kept, uses=uses, present=frozenset(present), aimless=aimless)


class Ledger:
    """The storages of one microbatch in the layers of one chunk, from its forward to its backward.

    ``owner`` remembers, for what was rebuilt, in which kind of window that was.
    """

    def __init__(self, index: GraphIndex, plans: Mapping[int, LayerPlan]) -> None:
        self.index = index
        self.patterns = {k: index.pattern(plan.dropped) for k, plan in plans.items()}
        self.uses = {k: dict(pattern.uses) for k, pattern in self.patterns.items()}
        self.present = {k: set(pattern.present) for k, pattern in self.patterns.items()}
        self.rebuilt: dict[tuple[int, str], str] = {}

    def copy(self) -> Ledger:
        """An independent ledger in the same state."""
        twin = object.__new__(Ledger)
        twin.index, twin.patterns = self.index, self.patterns
        twin.uses = {k: dict(uses) for k, uses in self.uses.items()}
        twin.present = {k: set(present) for k, present in self.present.items()}
        twin.rebuilt = dict(self.rebuilt)
        return twin

    def is_due(self, layer: int, region: str) -> bool:
        """Whether ``region`` is dropped and has not been run again."""
        pattern = self.patterns.get(layer)
        return pattern is not None and region in pattern.dropped and (layer, region) not in self.rebuilt

    def missing_for(self, layer: int, region: str) -> list[tuple[int, str]]:
        """The dropped regions, in the order to run them, that ``region`` needs and that have not
        been run again: those that make what it reads, and theirs before them."""
        found: list[tuple[int, str]] = []
        self._collect(layer, region, found)
        return found

    def _collect(self, layer: int, region: str, found: list[tuple[int, str]]) -> None:
        needs = [(layer, producer) for _, producer in self.index.reads[region]]
        if region == INPUT:
            needs.append((layer - 1, self.index.last))
        for need in needs:
            if need not in found and self.is_due(*need):
                self._collect(*need, found)
                found.append(need)

    def rebuild(self, layer: int, region: str, owner: str) -> tuple[int, list[tuple[str, int]]]:
        """Run ``region`` again: bytes that appear, and (owner, bytes) that its end frees."""
        uses, present = self.uses[layer], self.present[layer]
        taken = 0
        for storage, size in self.index.makes[region]:
            if uses[storage]:
                present.add(storage)
                taken += size
        self.rebuilt[layer, region] = owner
        return taken, self._used(layer, self.index.reads[region])

    def backward(self, layer: int, region: str) -> list[tuple[str, int]]:
        """The backward of ``region`` is done: (owner, bytes) that it frees."""
        return self._used(layer, self.index.saved[region])

    def _used(self, layer: int, storages: tuple[tuple[str, str], ...]) -> list[tuple[str, int]]:
        uses, present = self.uses[layer], self.present[layer]
        freed = []
        for storage, producer in storages:
            uses[storage] -= 1
            if uses[storage] == 0 and storage in present:
                present.discard(storage)
                owner = self.rebuilt.get((layer, producer), "kept")
                freed.append((owner, self.index.size[storage]))
        return freed
