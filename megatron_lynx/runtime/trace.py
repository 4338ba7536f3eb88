"""The graph of a layer as it really runs: one forward pass watched from part to part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.layers.kind import Glue, Inner, LayerKind
from megatron_lynx.runtime.region import flatten, is_weight
from megatron_lynx.runtime.rng import RandomSource


class Tracer:
    """Stands where a tape stands, drops nothing, and notes who made, saved and read each storage.

    Every storage that it has seen stays alive until it goes, so an address means one storage only.
    """

    def __init__(self, kind: LayerKind, rng: RandomSource) -> None:
        self.kind = kind
        self.draws: set[str] = set()
        self._rng = rng
        self.region = ""
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.made: dict[int, str] = {}
        self.saved_by: dict[int, list[str]] = {}
        self.reads: dict[str, list[int]] = {}
        self._masks = kind.masks()
        self._glue_after = {p.after: p for p in kind.parts if isinstance(p, Glue)}
        self._glue_before = {p.before: p for p in kind.parts if isinstance(p, Glue)}
        self._inside = {p.name for p in kind.parts if isinstance(p, Inner)}
        self._outside: set[int] = set()
        self._results: dict[str, list[int]] = {}

    def watch(self, forward: Callable[[], Any], hidden: torch.Tensor, others: Any) -> None:
        """Run a layer's forward with this as the executor's ``active``."""
        for tensor in flatten(others):
            self._outside.add(self._key(tensor))
        self.made[self._key(hidden)] = INPUT
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            forward()

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        self.storages.setdefault(key, storage)
        return key

    def _owned(self, value: Any) -> list[int]:
        """Keys of the layer's own storages in ``value``, each once."""
        keys = [self._key(t) for t in flatten(value) if not is_weight(t)]
        return [key for key in dict.fromkeys(keys) if key not in self._outside]

    def parent(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A parent module runs."""
        return call(*args, **kwargs)

    def record(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A part runs."""
        closing = self._glue_before.get(name)
        if closing is not None:
            self._made_by(closing.name, (args, kwargs))
        self.reads[name] = [key for key in self._owned((args, kwargs)) if key in self.made]
        outer, self.region = self.region, name
        before = self._rng.capture()
        try:
            out = call(*args, **kwargs)
        finally:
            self.region = outer
        if not self._rng.capture().same_as(before):
            self.draws.add(name)
        results = self._made_by(name, out)
        if name in self._inside:
            self.reads[outer] += results
        self._results[name] = results
        opening = self._glue_after.get(name)
        if opening is not None:
            self.region = opening.name
            self.reads[opening.name] = self._asked(opening)
        elif closing is not None:
            self.region = ""
        return out

    def _asked(self, glue: Glue) -> list[int]:
        """What the parts before ``glue`` in its parent passed on: its replay needs that."""
        asked = [part.name for part in self.kind.called_before(glue)]
        return list(dict.fromkeys(key for name in asked for key in self._results.get(name, ())))

    def _made_by(self, name: str, value: Any) -> list[int]:
        keys = self._owned(value)
        for key in keys:
            self.made.setdefault(key, name)
        return keys

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.region and type(tensor) is torch.Tensor and not is_weight(tensor):
            for key in self._owned(tensor):
                self.made.setdefault(key, self._masks.get(self.region, self.region))
                savers = self.saved_by.setdefault(key, [])
                if self.region not in savers:
                    savers.append(self.region)
        return tensor

    def graph(self, communicates: frozenset[str]) -> LayerGraph:
        """What was seen; ``communicates`` are the parts that issue a collective, and the input where making
        it again does.

        What the last part passes on is the next layer's input, and counted there.
        """
        made = {key: label for key, label in self.made.items() if label != self.kind.output}
        names = {key: f"{label}.{i}" for i, (key, label) in enumerate(made.items())}
        storages = [
            Storage(
                name=names[key],
                producer=label,
                size_bytes=self.storages[key].nbytes(),
                saved_by=tuple(self.saved_by.get(key, ())),
            )
            for key, label in made.items()
        ]
        present = {INPUT, *self.reads, *made.values()}
        regions = [
            Region(
                name=name,
                reads=tuple(names[key] for key in self.reads.get(name, ()) if key in names),
                communicates=name in communicates,
                draws=name in self.draws or name in self._masks.values(),
            )
            for name in (INPUT, *self.kind.names)
            if name in present
        ]
        return LayerGraph(regions=tuple(regions), storages=tuple(storages), cuts=self.kind.cuts)
