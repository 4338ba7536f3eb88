"""Which storages of one microbatch are at hand while its passes run, and when they are freed.

The users of a storage are the backward passes of the regions in ``saved_by`` and the dropped
regions that read it when they run again. Two ways to count:

- by phase (the planners' way, which a plan's budget is about): what some backward reads, and all
  that was kept, stays until the phase of its layer's backward is over that the graph names; what was
  rebuilt only to rebuild more stays until the end of the point (a window, the stall, a phase of a
  backward) of its last user;
- by region (``fine``; what the runtime does): everything stays until its last user is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.plan import LayerPlan
from megatron_lynx.simulator.passes import KEPT

Sized = tuple[str, int]
"""A storage's name and its size in bytes."""
Owned = tuple[str, int]
"""An owner (``passes.OWNERS``) and its bytes."""


class GraphIndex:
    """Look-ups of a LayerGraph that a walk over many layers needs, made once.

    ``saved[region]`` are the (storage, producer) pairs that its backward reads, ``reads[region]``
    those that its forward reads, ``makes[region]`` what it produces.
    """

    def __init__(self, graph: LayerGraph) -> None:
        producer = {storage.name: storage.producer for storage in graph.storages}
        self.graph = graph
        self.names = tuple(name for name in graph.names if name != INPUT)
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
        self.read_by_backward = frozenset(s.name for s in graph.storages if s.saved_by)
        self.size = {storage.name: storage.size_bytes for storage in graph.storages}
        self.release = {storage.name: graph.release_phase(storage.name) for storage in graph.storages}
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

    ``rebuilt`` says, for what was run again, whose the bytes are (``passes.OWNERS``). ``held`` are
    frees that wait for the end of a phase of a layer's backward, ``leaving`` those for the end of a point.
    """

    def __init__(self, index: GraphIndex, plans: Mapping[int, LayerPlan], fine: bool = False) -> None:
        self.index, self.fine = index, fine
        self.patterns = {k: index.pattern(plan.dropped) for k, plan in plans.items()}
        self.uses = {k: dict(pattern.uses) for k, pattern in self.patterns.items()}
        self.present = {k: set(pattern.present) for k, pattern in self.patterns.items()}
        self.rebuilt: dict[tuple[int, str], str] = {}
        self.held: dict[int, list[tuple[int, Owned]]] = {k: [] for k in plans}
        self.leaving: list[Owned] = []

    def copy(self) -> Ledger:
        """An independent ledger in the same state."""
        twin = object.__new__(Ledger)
        twin.index, twin.fine, twin.patterns = self.index, self.fine, self.patterns
        twin.uses = {k: dict(uses) for k, uses in self.uses.items()}
        twin.present = {k: set(present) for k, present in self.present.items()}
        twin.rebuilt = dict(self.rebuilt)
        twin.held = {k: list(held) for k, held in self.held.items()}
        twin.leaving = list(self.leaving)
        return twin

    def is_due(self, layer: int, region: str) -> bool:
        """Whether ``region`` is dropped and has not been run again."""
        pattern = self.patterns.get(layer)
        return pattern is not None and region in pattern.dropped and (layer, region) not in self.rebuilt

    def missing_for(self, layer: int, region: str) -> list[tuple[int, str]]:
        """The dropped regions, in the order to run them, that ``region`` needs and that have not
        been run again: those that make what it reads, and theirs before them. A layer's dropped
        input needs the whole layer before."""
        found: list[tuple[int, str]] = []
        self._collect(layer, region, found)
        return found

    def _collect(self, layer: int, region: str, found: list[tuple[int, str]]) -> None:
        needs = [(layer, producer) for _, producer in self.index.reads[region]]
        if region == INPUT:
            needs = [(layer - 1, name) for name in self.index.graph.names]
        for need in needs:
            if need not in found and self.is_due(*need):
                self._collect(*need, found)
                found.append(need)

    def rebuild(self, layer: int, region: str, owner: str) -> tuple[int, list[Owned]]:
        """Run ``region`` again: bytes that appear, and what its end frees at once."""
        uses, present = self.uses[layer], self.present[layer]
        taken = 0
        for storage, size in self.index.makes[region]:
            if uses[storage]:
                present.add(storage)
                taken += size
        self.rebuilt[layer, region] = owner
        return taken, self._used(layer, self.index.reads[region])

    def backward(self, layer: int, region: str) -> list[Owned]:
        """The backward of ``region`` is done: what that frees at once."""
        return self._used(layer, self.index.saved[region])

    def end_point(self) -> list[Owned]:
        """A window, the stall or a layer's backward is over: what that frees."""
        freed, self.leaving = self.leaving, []
        return freed

    def end_phase(self, layer: int, phase: int) -> list[Owned]:
        """A phase of the backward of ``layer`` is over: what that frees."""
        freed = [owned for release, owned in self.held[layer] if release <= phase]
        self.held[layer] = [entry for entry in self.held[layer] if entry[0] > phase]
        return freed + self.end_point()

    def _used(self, layer: int, storages: tuple[tuple[str, str], ...]) -> list[Owned]:
        uses, present = self.uses[layer], self.present[layer]
        freed = []
        for storage, producer in storages:
            uses[storage] -= 1
            if uses[storage] == 0 and storage in present:
                present.discard(storage)
                owner = self.rebuilt.get((layer, producer))
                freed.append((owner or KEPT, self.index.size[storage]))
                if not self.fine:
                    stays = owner is None or storage in self.index.read_by_backward
                    if stays:
                        self.held[layer].append((self.index.release[storage], freed.pop()))
                    else:
                        self.leaving.append(freed.pop())
        return freed
