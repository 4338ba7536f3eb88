"""RegionRun: one run of a region in a forward pass, and how to run it again.

Two kinds of region exist. A *call* is a submodule (or a bias-dropout-add): it is run again by
calling the same code with the same arguments. *Glue* is what a parent module does between two
submodules: it is run again by calling the parent's own forward with the submodule before it
answering from memory and the submodule after it ending the replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatron_lynx.errors import TapeError
from megatron_lynx.runtime.rng import RandomSource, RandomState
from megatron_lynx.runtime.storage import SavedTensor, TapeStorage

MASK_LABEL = {"self_attn_bda": "self_attn_dropout", "mlp_bda": "mlp_dropout"}
"""What a bias-dropout-add saves inside it is its mask, planned under a name of its own."""


class ReplayDone(Exception):  # noqa: N818 - a signal, not an error
    """Raised inside a replay as soon as everything wanted is there (Rule 3)."""


def flatten(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from flatten(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flatten(item)


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """``value`` with every leaf of type ``kind`` in nested tuples, lists and dicts changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(item, kind, change) for item in value)
    if isinstance(value, dict):
        return {key: map_leaves(item, kind, change) for key, item in value.items()}
    return value


class RegionRun:
    """One run of region ``name`` by one tape.

    Attributes:
        call: the region's own code; for glue, the parent's forward (set by the tape).
        arguments: ``(args, kwargs)`` with every tensor of the layer as a SavedTensor.
        reads: storages behind the arguments.
        packs: the storage of each tensor saved while it ran, None for weights and the like.
        outputs: SavedTensors and other values in the order in which they left the region.
        source, sink: for glue, the submodules before and after it.
    """

    def __init__(self, name: str, call: Callable[..., Any], communicates: bool) -> None:
        self.name = name
        self.call = call
        self.communicates = communicates
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.random: RandomState | None = None
        self.reads: tuple[TapeStorage, ...] = ()
        self.produced: list[TapeStorage] = []
        self.packs: list[TapeStorage | None] = []
        self.outputs: Any = None
        self.source: RegionRun | None = None
        self.sink = ""

    @property
    def inner_label(self) -> str:
        """The plan's name of what is saved inside this region."""
        return MASK_LABEL.get(self.name, self.name)

    def wanted(self) -> bool:
        """Whether it must still run again with its inputs: what it makes of them is absent and
        wanted. A mask does not count, since it needs no input."""
        mask = MASK_LABEL.get(self.name)
        return any(s.data is None and s.label != mask and s.wanted() for s in self.produced)

    def missing(self, labels: Iterable[str] | None = None) -> set[TapeStorage]:
        """Storages that this region makes, that are absent and wanted."""
        return {
            s
            for s in self.produced
            if s.data is None and s.wanted() and (labels is None or s.label in labels)
        }

    def is_hollow(self, wanted: set[TapeStorage]) -> bool:
        """Whether ``wanted`` are masks alone, which depend on no input (design, rule 3.5)."""
        return self.name in MASK_LABEL and all(s.label == self.inner_label for s in wanted)


class Replay:
    """Runs a region again and hands what it saves to the storages that want it.

    It answers the layer's wrapped submodules while it runs (``record``), and is the pack hook of
    every tensor saved meanwhile.
    """

    def __init__(self, run: RegionRun, wanted: set[TapeStorage]) -> None:
        self.run = run
        self.wanted = set(wanted)
        self.ordinal = 0
        self.capturing = run.source is None
        self.source_output: Any = None

    def execute(self, arguments: tuple[tuple[Any, ...], dict[str, Any]], rng: RandomSource) -> None:
        """Run the region on ``arguments`` until nothing is wanted any more.

        Raises:
            TapeError: the region did not save again what it saved in the forward pass.
        """
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, _never)
        args, kwargs = arguments
        random = rng.replaying(self.run.random)
        with contextlib.suppress(ReplayDone), random, torch.enable_grad(), hooks:
            self.finish(self.run.call(*args, **kwargs))
        if self.wanted:
            lost = ", ".join(sorted({s.label for s in self.wanted}))
            raise TapeError(
                f"region {self.run.name} saved {self.ordinal} tensors when it ran again and "
                f"{len(self.run.packs)} in the forward pass, so {lost} could not be rebuilt; "
                f"keep {self.run.name} in the plan, or report the layer's configuration"
            )

    def pack(self, tensor: torch.Tensor) -> None:
        """The pack hook: match by ordinal."""
        if not self.capturing:
            return
        position, self.ordinal = self.ordinal, self.ordinal + 1
        if position < len(self.run.packs):
            self.fill(self.run.packs[position], tensor)
        if not self.wanted:
            raise ReplayDone

    def fill(self, storage: TapeStorage | None, tensor: torch.Tensor) -> None:
        """Give ``tensor``'s memory to ``storage`` if it is wanted."""
        if storage in self.wanted:
            storage.data = tensor.untyped_storage()
            self.wanted.discard(storage)

    def finish(self, outputs: Any) -> None:
        """Take the outputs, matched by position."""
        saved = self.run.outputs
        for was, tensor in zip(_leaves(saved), flatten(outputs), strict=True):
            if isinstance(was, SavedTensor):
                self.fill(was.storage, tensor)

    def record(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a wrapped submodule of the parent of a glue region."""
        assert self.run.source is not None
        if name == self.run.source.name:
            self.capturing = True
            return self.source_output
        if name == self.run.sink:
            self.finish((args, kwargs))
            raise ReplayDone
        return call(*args, **kwargs)


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors and SavedTensors in the order of ``flatten``."""
    if isinstance(value, (torch.Tensor, SavedTensor)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)


def _never(_: object) -> torch.Tensor:
    raise AssertionError("a replay's graph is never used for a backward pass")
