"""RegionRun: one run of a part of a layer in a forward pass, and how to run it again.

Two ways exist. A *call* is run again by calling the same code, below module hooks, with the same
arguments. *Glue* is what a parent module does between two submodules: the parent's forward is called with
the submodules before answering from memory and the one after it ending the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch

from megatron_lynx.errors import TapeError
from megatron_lynx.layers.kind import Glue
from megatron_lynx.runtime.program import Step
from megatron_lynx.runtime.rng import RandomSource, RandomState
from megatron_lynx.runtime.storage import SavedTensor, TapeStorage

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Place = TypeVar("Place")


class ReplayDone(Exception):  # noqa: N818 - a signal, not an error
    """Raised inside a replay as soon as everything wanted is there (Rule 3)."""


def flatten(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return
    for item in value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif item is not None:
            _gather(item, found)


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """``value`` with every leaf of type ``kind`` in nested tuples, lists and dicts changed."""
    if isinstance(value, kind):
        return change(value)
    made = type(value)
    if made is tuple:
        return tuple([item if item is None else map_leaves(item, kind, change) for item in value])
    if made is dict:  # arguments by name, of which a layer has a dozen that are None
        mapped = {k: item if item is None else map_leaves(item, kind, change) for k, item in value.items()}
        return mapped if value else value
    if isinstance(value, tuple):
        parts = [map_leaves(item, kind, change) for item in value]
        return made(*parts) if hasattr(value, "_fields") else made(parts)
    if isinstance(value, (list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        pairs = [(key, map_leaves(item, kind, change)) for key, item in items]
        return made(pairs) if isinstance(value, dict) else made([item for _, item in pairs])
    return value


def is_weight(tensor: torch.Tensor) -> bool:
    """A parameter or a view of one: its memory is the model's, not the layer's."""
    if type(tensor) is torch.nn.Parameter:
        return True
    base = tensor._base
    return base is not None and isinstance(base, torch.nn.Parameter)


set_hooks = torch._C._autograd._push_saved_tensors_default_hooks
unset_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
"""What ``saved_tensors_hooks`` calls; its object would hold the tape, and the tape it."""


class Host(Protocol):
    """What a run needs of the executor."""

    rng: RandomSource
    device: torch.device
    active: Any

    def begin_replay(self, replay: Any) -> Any:
        """From here to ``end_replay`` collectives are plain, windows stay shut and ``active`` is ``replay``;
        returns what ``end_replay`` takes."""

    def end_replay(self, began: Any, layer: int, storages: int, size_bytes: int) -> None:
        """A replay is over, which gave so much memory back."""


class RegionRun:
    """One run of a part.

    Attributes:
        call: runs it again on its arguments; for glue, a ``GlueSite``.
        arguments: ``(args, kwargs)``; tensors as SavedTensors where they are dropped, detached where they
            are kept.
        reads: the absent storages behind the arguments.
        answers: results of the parts that are answered from memory, in the form of ``arguments``.
        saved, passed: what it made and the plan drops, by ordinal of the save, and by the name of the part
            that passed it on and the place among its tensors. What nobody wants any more is gone.
        packs: how many tensors autograd saved while it ran.
        kept: of a span, the storages of its arguments that stay, by address.
        closes: of a span (``program``), by part, the glue that ends before it.
    """

    __slots__ = (
        "__weakref__", "answers", "arguments", "call", "closes", "host", "kept", "layer", "packs", "passed",
        "random", "reads", "saved", "step", "windows",
    )  # fmt: skip

    def __init__(
        self, step: Step, layer: int, windows: frozenset[str], call: Callable[..., Any], host: Host
    ) -> None:
        self.step = step
        self.layer = layer
        self.windows = windows
        self.call = call
        self.host = host
        self.arguments: Arguments = ((), {})
        self.reads: tuple[TapeStorage, ...] = ()
        self.answers: dict[str, Any] = {}
        self.random: RandomState | None = None
        self.saved: list[tuple[int, ref[TapeStorage]]] = []
        self.passed: list[tuple[tuple[str, int], ref[TapeStorage]]] = []
        self.packs = 0
        self.closes: Mapping[str, str] = {}
        self.kept: set[int] = set()

    def make(self, label: str) -> TapeStorage:
        """A storage that this run made and the plan drops."""
        return TapeStorage(label, self)

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook of a span: all of it runs again, so of what it makes the ordinal alone tells what is
        saved. Its arguments stay."""
        ordinal, self.packs = self.packs, self.packs + 1
        if type(tensor) is not torch.Tensor:
            return tensor
        with torch._C.DisableTorchFunction():
            if is_weight(tensor) or tensor.untyped_storage()._cdata in self.kept:
                return tensor
        made = self.make(self.step.label)
        self.saved.append((ordinal, ref(made)))
        return made

    def missing(self, labels: Iterable[str] | None = None) -> set[TapeStorage]:
        """What this run made, is absent and somebody wants: of ``labels``, or of all."""
        alive = (storage() for _, storage in (*self.saved, *self.passed))
        return {
            s for s in alive if s is not None and s.data is None and (labels is None or s.label in labels)
        }

    def is_hollow(self, wanted: Iterable[TapeStorage]) -> bool:
        """Whether ``wanted`` are masks alone, which depend on no input (design, rule 3.5)."""
        mask = self.step.label
        return mask != self.step.name and all(storage.label == mask for storage in wanted)

    def is_quiet(self) -> bool:
        """Whether running it again, with all that must run before it, issues no collective."""
        return not self.step.communicates and all(
            storage.data is not None or (isinstance(storage.maker, RegionRun) and storage.maker.is_quiet())
            for storage in self.reads
        )

    def rebuild_for(self, storage: TapeStorage) -> None:
        """Run again on demand: for ``storage`` and all else that is wanted and no window is to rebuild."""
        on_the_side = {s for s in self.missing() if s.label not in self.windows}
        self.rebuild(on_the_side | {storage})

    def rebuild(self, wanted: set[TapeStorage]) -> None:
        """Run again until ``wanted`` is there; what it reads is rebuilt first, unless it needs none."""
        if not wanted:
            return
        hollow = self.host.device if self.is_hollow(wanted) else None
        if hollow is None:
            for storage in self.reads:
                if storage.data is None and storage.maker is not None:
                    storage.maker.rebuild_for(storage)
        replay = Replay(self, wanted)
        began = self.host.begin_replay(replay)
        try:
            replay.execute(hollow)
        finally:
            self.host.end_replay(began, self.layer, *replay.rebuilt())

    def held(self) -> Iterator[torch.UntypedStorage]:
        """The memory that it holds, and what of its own is there already."""
        for tensor in (*flatten(self.arguments), *flatten(self.answers)):
            if not is_weight(tensor):
                yield tensor.untyped_storage()
        for _, reference in (*self.saved, *self.passed):
            storage = reference()
            if storage is not None and storage.data is not None:
                yield storage.data.untyped_storage()


class Replay:
    """Runs a part again and hands what it makes to the storages that want it.

    While it runs it answers the layer's wrapped parts (``record``), and packs every tensor that is saved.
    """

    __slots__ = ("_all", "_by_ordinal", "_ordinal", "_passed", "_wanted", "run")

    def __init__(self, run: RegionRun, wanted: set[TapeStorage]) -> None:
        self.run = run
        self._all, self._wanted = wanted, set(wanted)
        self._ordinal = 0
        self._by_ordinal = dict(self._of(run.saved))
        self._passed = dict(self._of(run.passed))

    def _of(self, made: list[tuple[Place, ref[TapeStorage]]]) -> Iterator[tuple[Place, TapeStorage]]:
        for place, reference in made:
            storage = reference()
            if storage is not None and storage in self._wanted:
                yield place, storage

    def execute(self, hollow: torch.device | None) -> None:
        """Run the part until nothing is wanted any more; on hollow inputs if ``hollow`` names a device.

        Raises:
            TapeError: the part did not make again what it made in the forward pass.
        """
        run, rng = self.run, self.run.host.rng
        args, kwargs = map_leaves(run.arguments, SavedTensor, lambda t: _argument(t, hollow))
        current = None if run.random is None else rng.exchange(run.random)
        graded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        set_hooks(self._pack, _never)
        try:
            self.take(run.step.name, run.call(*args, **kwargs))
        except ReplayDone:
            pass
        finally:
            unset_hooks()
            torch._C._set_grad_enabled(graded)
            if current is not None:
                rng.restore(current)
        if self._wanted:
            lost = ", ".join(sorted({s.label for s in self._wanted}))
            raise TapeError(
                f"region {run.step.name} of layer {run.layer} saved {self._ordinal} tensors when it ran "
                f"again and {run.packs} in the forward pass, so {lost} could not be rebuilt; "
                f"keep {run.step.name} in the plan, or report the layer's configuration"
            )

    def _pack(self, tensor: torch.Tensor) -> None:
        """The pack hook: match by ordinal."""
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        storage = self._by_ordinal.get(ordinal)
        if storage is not None:
            self._fill(storage, tensor)
            if not self._wanted:
                raise ReplayDone

    def _fill(self, storage: TapeStorage, tensor: torch.Tensor) -> None:
        if storage in self._wanted:
            with torch._C.DisableTorchFunction():
                storage.fill(tensor.detach())
            self._wanted.discard(storage)

    def rebuilt(self) -> tuple[int, int]:
        """How many blocks of memory it gave back, and their bytes."""
        with torch._C.DisableTorchFunction():
            back = [one.data.untyped_storage() for one in self._all if one.data is not None]
            blocks = {storage._cdata: storage.nbytes() for storage in back}
        return len(blocks), sum(blocks.values())

    def take(self, name: str, outputs: Any) -> None:
        """Take what the part ``name`` passes on, matched by place."""
        for place, tensor in enumerate(flatten(outputs)):
            storage = self._passed.get((name, place))
            if storage is not None:
                self._fill(storage, tensor)

    def answer(self, name: str) -> Any:
        """The result of the part ``name`` in the forward pass, from memory.

        What is kept is handed out as a tensor of its own: whoever gets it may give its data away, as
        Transformer Engine's frozen linear does with what its norm made.
        """
        result = map_leaves(self.run.answers[name], torch.Tensor, _own)
        return map_leaves(result, SavedTensor, lambda t: _argument(t, None))

    def meet(self, name: str, glue: Glue, args: Any, kwargs: Any) -> Any:
        """The parent of ``glue`` calls its submodule ``name``: from memory up to the glue, which begins
        with the answer of the one before it and ends with the call of the one after it."""
        if name == glue.before:
            self.take(glue.name, (args, kwargs))
            raise ReplayDone
        if name == glue.after:
            self._ordinal = 0  # what was saved before is not the glue's own
        return self.answer(name)

    def record(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A part that runs inside this one: from memory if it was answered for, else as it is."""
        if name in self.run.answers:
            return self.answer(name)
        if ends := self.run.closes.get(name):
            self._take_within(ends, (args, kwargs))
        out = call(*args, **kwargs)
        self._take_within(name, out)
        return out

    def _take_within(self, name: str, outputs: Any) -> None:
        """A part inside this one is over: maybe everything wanted is there."""
        self.take(name, outputs)
        if not self._wanted:
            raise ReplayDone

    @property
    def region(self) -> str:
        """The part that runs again."""
        return self.run.step.name

    def parent(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A parent module runs."""
        return call(*args, **kwargs)


def _argument(saved: SavedTensor, hollow: torch.device | None) -> torch.Tensor:
    tensor = saved.restore() if hollow is None else saved.hollow(hollow)
    if not saved.requires_grad:
        return tensor
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad_()


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory; a weight is itself."""
    with torch._C.DisableTorchFunction():
        return tensor if is_weight(tensor) else tensor.detach().requires_grad_(tensor.requires_grad)


def _never(_: object) -> torch.Tensor:
    raise AssertionError("a replay's graph is never used for a backward pass")
