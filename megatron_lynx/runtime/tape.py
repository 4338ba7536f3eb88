"""LayerTape: what one layer saved for one microbatch, dropped and rebuilt as a plan says.

The layer's own forward runs under ``saved_tensors_hooks`` with its submodules wrapped, so that
the tape knows which region it is in. The rules:

Rule 1  A saved tensor is known by its storage. If an earlier region produced it, saving it again
        is a reference to that region's output; so a linear's saved input is restored by rebuilding
        what *produced* it, never by running the GEMM. If this region produced it, it is known as
        (region, ordinal of the save).
Rule 2  The plan decides per storage: keep it, or hold only the reference. Weights, what comes from
        outside the layer and everything not planned are kept. A kept region's output that nobody
        saves is kept too if a dropped region needs it to run again.
Rule 3  Rebuilding a region runs the same code again, grad enabled, under capturing hooks, and
        stops as soon as the last wanted storage exists.
Rule 4  ``unpack`` finds its storage or rebuilds on demand. This is right whatever the windows did.
Rule 5  Random state is captured only for regions that draw, and put back after each replay.
Rule 6  A rebuilt storage is freed at its last use; after a step the tape holds nothing. Nothing
        outside the layer sees a replay: region code is called directly, past module hooks.
Rule 7  What runs in a window comes from the plan, never from timing: ranks that share collectives
        stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_lynx.errors import TapeError
from megatron_lynx.graph import INPUT
from megatron_lynx.runtime.region import MASK_LABEL, RegionRun, Replay, flatten, map_leaves
from megatron_lynx.runtime.rng import RandomSource
from megatron_lynx.runtime.storage import SavedTensor, TapeStorage

_past_modes = torch._C.DisableTorchFunction
"""The tape's own look at tensors is nobody's business, and quicker without function modes."""


@dataclass(frozen=True, slots=True)
class Glue:
    """What parent module ``parent`` does between submodules ``source`` and ``sink``."""

    name: str
    parent: str
    source: str
    sink: str


GLUES = (
    Glue("qkv_split", "self_attention", "linear_qkv", "core_attention"),
    Glue("activation", "mlp", "linear_fc1", "linear_fc2"),
)
_AFTER = {glue.source: glue for glue in GLUES}
_BEFORE = {glue.sink: glue for glue in GLUES}


@dataclass(frozen=True, slots=True, kw_only=True)
class TapePlan:
    """What a tape must know of the plan and of the layer: names of regions.

    ``dropped`` are not kept; ``draws`` use random state; ``communicates`` issue a collective; ``windows``
    are rebuilt in a window, so a replay on demand that could make them on the side leaves them to it.
    """

    layer: int
    dropped: frozenset[str]
    draws: frozenset[str] = field(default_factory=frozenset)
    communicates: frozenset[str] = field(default_factory=frozenset)
    windows: frozenset[str] = field(default_factory=frozenset)


class Host(Protocol):
    """What a tape needs of the executor that owns it."""

    rng: RandomSource
    device: torch.device
    active: Any

    def replaying(self) -> AbstractContextManager[None]:
        """A context in which collectives are plain and windows stay shut."""

    def rebuilt(self, tape: LayerTape, storages: int, size_bytes: int) -> None:
        """Called after each replay."""

    def finished(self, tape: LayerTape) -> None:
        """Called when the tape's last saved tensor has been unpacked."""


class LayerTape:
    """One layer, one microbatch in flight."""

    def __init__(self, plan: TapePlan, host: Host) -> None:
        self.plan = plan
        self.host = host
        self.runs: dict[str, RegionRun] = {}
        self.storages: list[TapeStorage] = []
        self.pending = 0
        self.output: TapeStorage | None = None
        self._known: dict[int, TapeStorage | None] = {}
        self._current: RegionRun | None = None
        self._glue: tuple[Glue, RegionRun] | None = None
        self._parents: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {}

    # --- forward -------------------------------------------------------------------------------

    def begin(self, hidden: torch.Tensor, others: Any, carried: TapeStorage | None) -> None:
        """Start a forward pass: ``hidden`` is the layer's input, ``others`` its other arguments.

        ``carried`` is the input as the previous layer's tape knows it, if that produced it.
        """
        for tensor in flatten(others):
            self._known[tensor.untyped_storage()._cdata] = None
        storage = hidden.untyped_storage()
        if carried is None or carried.address != storage._cdata:
            carried = TapeStorage(storage, INPUT, None, dropped=False)
        self._known[storage._cdata] = carried
        self.storages.append(carried)

    def parent(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A wrapped parent module runs: remember how, for the glue inside it."""
        if any(glue.parent == name and glue.name in self.plan.dropped for glue in GLUES):
            empty = torch.empty(0, device=self.host.device)
            self._parents[name] = (call, (empty, *args[1:]), kwargs)
        return call(*args, **kwargs)

    def record(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A wrapped submodule runs as region ``name``."""
        if name in _BEFORE:
            with _past_modes():
                self._close_glue(args, kwargs)
        run = RegionRun(name, call, name in self.plan.communicates)
        if self._replayable(run):
            with _past_modes():
                self._remember(run, args, kwargs)
        self._current = run
        try:
            out = call(*args, **kwargs)
        finally:
            self._current = None
        with _past_modes():
            run.outputs = map_leaves(out, torch.Tensor, lambda t: self._reference(t, run))
            self.runs[name] = run
            if name in _AFTER:
                self._open_glue(_AFTER[name], run, out)
        return out

    def end(self, output: torch.Tensor) -> None:
        """The forward pass is over: from here on storages are known by their records alone."""
        self.output = self._known.get(output.untyped_storage()._cdata)
        for storage in self.storages:
            if storage is not self.output:
                storage.forget_address()
        self._known.clear()
        self._parents.clear()
        self._glue = None

    def _dropped(self, label: str) -> bool:
        return label in self.plan.dropped

    def _replayable(self, run: RegionRun) -> bool:
        return self._dropped(run.name) or self._dropped(run.inner_label)

    def _remember(self, run: RegionRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what it takes to run the region again (Rule 2, Rule 5)."""
        run.arguments = map_leaves((args, kwargs), torch.Tensor, self._reference)
        if run.name in self.plan.draws:
            run.random = self.host.rng.capture()
        if not self._dropped(run.name):
            return  # only its mask is dropped, which needs no input
        reads = []
        for tensor in flatten((args, kwargs)):
            key = tensor.untyped_storage()._cdata
            if key not in self._known and not _is_weight(tensor):
                raise TapeError(
                    f"region {run.name} of layer {self.plan.layer} reads a tensor that no region "
                    f"produced; keep {run.name} in the plan, or report the layer's configuration"
                )
            storage = self._known.get(key)
            if storage is not None:
                storage.keep(tensor.untyped_storage())
                storage.readers.append(run)
                reads.append(storage)
        run.reads = tuple(dict.fromkeys(reads))

    def _open_glue(self, glue: Glue, source: RegionRun, out: Any) -> None:
        call, args, kwargs = self._parents.get(glue.parent, (_no_parent, (), {}))
        run = RegionRun(glue.name, call, communicates=False)
        run.source, run.sink = source, glue.sink
        if self._dropped(glue.name):
            self._remember(run, (out,), {})
            run.arguments = (args, kwargs)
        self._glue, self._current = (glue, run), run

    def _close_glue(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._glue is not None
        glue, run = self._glue
        run.outputs = map_leaves((args, kwargs), torch.Tensor, lambda t: self._reference(t, run))
        self.runs[glue.name] = run
        self._glue = self._current = None

    def _reference(self, tensor: torch.Tensor, run: RegionRun | None = None) -> Any:
        """``tensor`` as a SavedTensor if the layer produced it; itself if it came from outside.

        An unknown tensor that leaves ``run`` was produced by it.
        """
        if _is_weight(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known and run is not None:
            self._add(storage, run.name, run)
        known = self._known.get(key)
        return tensor if known is None else SavedTensor(known, tensor)

    def _add(self, storage: torch.UntypedStorage, label: str, run: RegionRun) -> TapeStorage:
        made = TapeStorage(storage, label, run, self._dropped(label))
        self._known[storage._cdata] = made
        self.storages.append(made)
        run.produced.append(made)
        return made

    @property
    def layer(self) -> int:
        """Global index of the layer."""
        return self.plan.layer

    @property
    def region(self) -> str:
        """The region that runs now, in the forward pass; empty between regions."""
        return self._current.name if self._current else ""

    # --- the hooks -----------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves (Rule 1, Rule 2)."""
        run = self._current
        if run is None or type(tensor) is not torch.Tensor or _is_weight(tensor):
            if run is not None:
                run.packs.append(None)
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known[key] if key in self._known else self._add(storage, run.inner_label, run)
        run.packs.append(known)
        if known is None:
            return tensor
        known.keep(storage)
        known.pending += 1
        self.pending += 1
        return SavedTensor(known, tensor)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Called by autograd when a backward needs a saved tensor (Rule 4, Rule 6).

        Raises:
            TapeError: a second backward pass through the same graph.
        """
        if not isinstance(saved, SavedTensor):
            assert isinstance(saved, torch.Tensor)
            return saved
        storage = saved.storage
        if storage.pending == 0:
            raise TapeError(
                f"layer {self.plan.layer} runs backward a second time; --recompute-method lynx "
                "frees activations in the first one (retain_graph works without it)"
            )
        if storage.data is None:
            assert storage.run is not None
            self.rebuild(storage.run, need=storage)
        with _past_modes():
            tensor = saved.restore()
        storage.pending -= 1
        storage.release_if_done()
        self.pending -= 1
        if self.pending == 0:
            self.clear()
            self.host.finished(self)
        return tensor

    # --- rebuilding ----------------------------------------------------------------------------

    def rebuild(
        self,
        run: RegionRun,
        need: TapeStorage | None = None,
        labels: tuple[str, ...] | None = None,
    ) -> None:
        """Run ``run`` again for ``need`` and everything else of it that is absent and wanted, and that no
        window is to rebuild.

        What it reads is rebuilt first. ``labels`` limits the work to a mask or an output.
        """
        wanted = run.missing(labels)
        if labels is None:
            wanted = {s for s in wanted if s.label not in self.plan.windows}
        if need is not None:
            wanted.add(need)
        if not wanted:
            return
        hollow = self.host.device if run.is_hollow(wanted) else None
        if hollow is None:
            for storage in run.reads:
                if storage.data is None:
                    assert storage.run is not None
                    self.rebuild(storage.run, need=storage)
        size = sum(storage.size_bytes for storage in wanted)
        replay = Replay(run, wanted)
        with self.host.replaying():
            arguments = map_leaves(run.arguments, SavedTensor, lambda t: _argument(t, hollow))
            if run.source is not None:
                replay.source_output = map_leaves(
                    run.source.outputs, SavedTensor, lambda t: _argument(t, None)
                )
                previous, self.host.active = self.host.active, replay
                try:
                    replay.execute(arguments, self.host.rng)
                finally:
                    self.host.active = previous
            else:
                replay.execute(arguments, self.host.rng)
        for storage in run.reads:
            storage.release_if_done()
        self.host.rebuilt(self, len(wanted), size)

    def rebuild_label(self, label: str) -> None:
        """Rebuild what the plan calls ``label``, if it can be done without communication."""
        run = self.run_of(label)
        if run is None:
            return
        wanted = run.missing((label,))
        if wanted and (run.is_hollow(wanted) or self._is_quiet(run)):
            self.rebuild(run, labels=(label,))

    def run_of(self, label: str) -> RegionRun | None:
        """The run behind a plan's label; None once the tape is finished."""
        for name, mask in MASK_LABEL.items():
            if label == mask:
                return self.runs.get(name)
        return self.runs.get(label)

    def _is_quiet(self, run: RegionRun) -> bool:
        """Whether running it again, with all that must run before it, issues no collective."""
        if run.communicates:
            return False
        return all(
            storage.data is not None or (storage.run is not None and self._is_quiet(storage.run))
            for storage in run.reads
        )

    # --- accounting ----------------------------------------------------------------------------

    def held_bytes(self) -> int:
        """Bytes that the tape holds now, its input included."""
        return sum(s.size_bytes for s in self.storages if s.data is not None)

    def clear(self) -> None:
        """Let go of everything."""
        for storage in self.storages:
            if storage is not self.output:
                storage.data = None
                storage.readers.clear()
        self.storages.clear()
        self.runs.clear()
        if self.output is not None:
            self.output.forget_address()
            self.output = None


def _argument(saved: SavedTensor, hollow: torch.device | None) -> torch.Tensor:
    tensor = saved.restore() if hollow is None else saved.hollow(hollow)
    return tensor.requires_grad_(saved.requires_grad) if saved.requires_grad else tensor


def _is_weight(tensor: torch.Tensor) -> bool:
    """A parameter or a view of one: its memory is the model's, not the layer's."""
    base = tensor._base
    return isinstance(tensor if base is None else base, torch.nn.Parameter)


def _no_parent(*_: Any, **__: Any) -> Any:
    raise AssertionError("a glue region that is not dropped is never run again")
