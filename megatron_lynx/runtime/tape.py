"""LayerTape: what one layer would save for one microbatch, dropped and rebuilt as a plan says.

The layer's own forward runs with its touched parts wrapped, so that the tape knows which part runs. The
rules:

Rule 1  A saved tensor is known by its storage. If an earlier part produced it, saving it again
        is a reference to that part's output; so a linear's saved input is restored by rebuilding
        what *produced* it, never by running the GEMM. If this part produced it, it is known as
        (part, ordinal of the save).
Rule 2  The plan decides per storage: hold only the reference, or let autograd keep it as ever. A kept
        part's output that nobody saves is kept too if a dropped part needs it to run again.
Rule 3  Rebuilding a part runs the same code again, grad enabled, under capturing hooks, and
        stops as soon as the last wanted storage exists. Parts that are dropped on demand from the
        layer's start on run again as one (``program.Span``).
Rule 4  ``unpack`` finds its storage or rebuilds on demand. This is right whatever the windows did.
Rule 5  Random state is captured only for parts that draw, and put back after each replay.
Rule 6  References go one way (``storage``): what is dropped or rebuilt goes at its last use, by reference
        count. Nothing outside the layer sees a replay: code is called directly, past module hooks.
Rule 7  What runs in a window comes from the plan, never from timing: ranks that share collectives
        stay in step.
Rule 8  A part may run inside another (a norm in its linear): a replay of the outer one answers the inner
        one from memory. Every replay is the executor's ``active``.
Rule 9  Hooks are set only where something dropped is saved; a Parameter that is saved there comes back as
        itself (``integration.parameters``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lynx.runtime.program import LayerProgram, Span, Step
from megatron_lynx.runtime.region import (
    Host,
    RegionRun,
    flatten,
    is_weight,
    map_leaves,
    set_hooks,
    unset_hooks,
)
from megatron_lynx.runtime.storage import NOTHING, Known, SavedTensor, TapeStorage, unpack

_past_modes = torch._C.DisableTorchFunction
"""The tape's own look at tensors is nobody's business, and quicker without function modes."""


class LayerTape:
    """One layer, one microbatch in flight.

    ``runs`` finds what can run again by its label; ``region`` is the part that runs now, in the forward
    pass. ``sites`` has, by name, how parts run again that do not by a call of their own code alone
    (``GlueSite``, ``QuietCall``). A ``Census`` sets ``kept``, which is told of every tensor that stays, and
    ``kept_bytes``.
    """

    __slots__ = (
        *(
            "__weakref__",
            "_glue",
            "_kept",
            "_known",
            "_outside",
            "_parents",
            "_results",
            "_run",
            "_sites",
            "_span",
        ),
        *("host", "kept", "kept_bytes", "program", "region", "runs"),
    )

    def __init__(self, program: LayerProgram, sites: Mapping[str, Any], host: Host) -> None:
        self.program = program
        self.host = host
        self.runs: dict[str, ref[RegionRun]] = {}
        self.region = ""
        self.kept: Callable[[torch.Tensor], None] | None = None
        self.kept_bytes = 0
        self._sites = sites
        self._known: dict[int, Known] = {}
        self._kept: set[int] = set()
        self._run: RegionRun | None = None
        self._glue: Step | None = None
        self._span: Span | None = None
        self._outside: set[int] = set()
        self._parents: dict[str, tuple[Any, set[int]]] = {}
        self._results: dict[str, tuple[Any, list[TapeStorage]]] = {}

    @property
    def hooking(self) -> bool:
        """Whether hooks for saved tensors are set now."""
        step = self.program.steps.get(self.region)
        return self.kept is not None or self._span is not None or (step is not None and step.hooked)

    @property
    def layer(self) -> int:
        """Global index of the layer."""
        return self.program.layer

    # --- forward -------------------------------------------------------------------------------

    def run(
        self, forward: Callable[[], Any], hidden: torch.Tensor, others: Any, carried: Known | None
    ) -> tuple[Any, Known | None]:
        """Run the layer's forward: ``hidden`` is its input, ``others`` its other arguments.

        ``carried`` is the input as the previous layer's tape knows it, where the plan drops it; what comes
        back beside the result is the output, if the plan drops that.
        """
        with _past_modes():
            if self.program.parents:
                self._outside = {id(t) for t in flatten(others)}
            if carried is not None:
                self._known[hidden.untyped_storage()._cdata] = carried
        if self.program.span is not None:
            self._open_span(self.program.span, hidden, others)
        try:
            out = forward()
        finally:
            self._leave_span()  # these are open only where the forward was cut short
            self._leave_glue()
        output = out[0] if isinstance(out, tuple) else out
        with _past_modes():
            passed = self._known.get(output.untyped_storage()._cdata)
        for held in (self._known, self._kept, self._outside, self._parents, self._results):
            held.clear()
        return out, passed

    def parent(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A parent module runs: remember its arguments for the glue inside it."""
        if name in self.program.parents:
            with _past_modes():
                keys = {t.untyped_storage()._cdata for t in flatten((args, kwargs)) if id(t) in self._outside}
                self._parents[name] = (map_leaves((args, kwargs), torch.Tensor, self._from_outside), keys)
        return call(*args, **kwargs)

    def _from_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor from outside the layer as it is; for one of the layer's own something of its shape,
        since the submodule that would read it answers from memory."""
        if id(tensor) in self._outside or isinstance(tensor, torch.nn.Parameter):
            return tensor
        return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    def record(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A wrapped part runs."""
        step = self.program.steps.get(name)
        outer, previous, self.region = self._run, self.region, name
        if step is None:
            try:
                return call(*args, **kwargs)
            finally:
                self.region = previous
        if self._span is not None:
            ends = self._span.closes.get(name)
            if ends != self._span.last:
                return self._record_spanned(self._span, step, call, args, kwargs)
            self._close_span(self._span, ends, (args, kwargs))
            outer = None
        elif step.closes:
            self._close_glue(args, kwargs)
            outer = None
        kept, self._kept = self._kept, set()
        run = self._run = self._new_run(step, call, args, kwargs) if step.again else None
        if step.hooked:
            set_hooks(self.pack, unpack)
        try:
            out = call(*args, **kwargs)
        finally:
            if step.hooked:
                unset_hooks()
            self._run, self.region = outer, previous
        with _past_modes():
            if run is not None and step.drops_output:
                self._register_passed(run, name, out)
            if step.answers:
                self._answer(name, out, outer)
        self._kept = kept
        if step.opens:
            self._open_glue(step.opens, out)
        return out

    def _new_run(self, step: Step, call: Callable[..., Any], args: Any, kwargs: Any) -> RegionRun:
        """What it takes to run the part again (Rule 2, Rule 5)."""
        again = self._sites.get(step.name, call)
        run = RegionRun(step, self.layer, self.program.windows, again, self.host)
        self.runs[step.name] = ref(run)
        if step.label != step.name:
            self.runs[step.label] = self.runs[step.name]
        with _past_modes():
            reads: list[TapeStorage] = []
            keep = self._hollow if not step.drops_output else self._keeper(reads)
            run.arguments = map_leaves((args, kwargs), torch.Tensor, keep)
            run.reads = tuple(dict.fromkeys(reads))
        if step.draws:
            run.random = self.host.rng.capture()
        return run

    def _keeper(self, reads: list[TapeStorage]) -> Callable[[torch.Tensor], Any]:
        """Turns an argument into what a run may hold: a reference if it is dropped, else a tensor that
        holds the memory but no autograd graph."""

        def keep(tensor: torch.Tensor) -> Any:
            if is_weight(tensor):
                return tensor
            key = tensor.untyped_storage()._cdata
            known = self._known.get(key)
            if known is None:
                self._kept.add(key)
                if self.kept is not None:
                    self.kept(tensor)
                return tensor.detach().requires_grad_(tensor.requires_grad)
            reads.append(known[0])
            return SavedTensor(known[0], tensor)

        return keep

    def _hollow(self, tensor: torch.Tensor) -> Any:
        """An argument of which only the geometry matters: what is rebuilt is a mask."""
        self._kept.add(tensor.untyped_storage()._cdata)
        return tensor if is_weight(tensor) else SavedTensor(NOTHING, tensor)

    def _register_passed(self, run: RegionRun, name: str, out: Any) -> None:
        """What the part ``name`` passes on is dropped, if ``run`` makes it."""
        for place, tensor in enumerate(flatten(out)):
            if is_weight(tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self._known.get(key)
            if known is None and key not in self._kept:
                known = self._register(run.make(run.step.name), storage)
            if known is not None and known[0].maker is run:
                run.passed.append(((name, place), ref(known[0])))

    def _register(self, made: TapeStorage, storage: torch.UntypedStorage) -> Known:
        known = (made, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        self._known[storage._cdata] = known
        return known

    def _answer(self, name: str, out: Any, outer: RegionRun | None) -> None:
        """Hold what a part passes on for the part that will ask for it when it runs again."""
        reads: list[TapeStorage] = []
        result = map_leaves(out, torch.Tensor, self._keeper(reads))
        if outer is not None:  # it ran inside
            outer.answers[name] = result
            outer.reads = tuple(dict.fromkeys((*outer.reads, *reads)))
        else:
            self._results[name] = (result, reads)

    # --- a span --------------------------------------------------------------------------------

    def _open_span(self, span: Span, hidden: torch.Tensor, others: Any) -> None:
        """The layer begins with parts that run again as one, from the layer's own arguments."""
        site = self._sites[span.step.name]
        run = self._run = RegionRun(span.step, self.layer, self.program.windows, site, self.host)
        self.runs[span.step.name] = ref(run)
        with _past_modes():
            reads: list[TapeStorage] = []
            arguments = (hidden, *others[0]), others[1]
            run.arguments = map_leaves(arguments, torch.Tensor, self._keeper(reads))
            run.reads, run.closes, run.kept = tuple(reads), span.closes, self._kept
        if span.step.draws:
            run.random = self.host.rng.capture()
        self._span = span
        set_hooks(run.pack, unpack)

    def _record_spanned(self, span: Span, step: Step, call: Any, args: Any, kwargs: Any) -> Any:
        """A wrapped part of the span runs."""
        if ends := span.closes.get(step.name):
            self._pass_on(span, ends, (args, kwargs))
        previous, self.region = self.region, step.name
        try:
            out = call(*args, **kwargs)
        finally:
            self.region = previous
        if step.name == span.last:
            self._close_span(span, step.name, out)
        else:
            self._pass_on(span, step.name, out)
        if step.answers:
            with _past_modes():
                self._answer(step.name, out, None)
        if step.opens:
            self._open_glue(step.opens, out)
        return out

    def _pass_on(self, span: Span, name: str, out: Any) -> None:
        """The part ``name`` of the span is over."""
        if name in span.passes and self._run is not None:
            with _past_modes():
                self._register_passed(self._run, name, out)

    def _close_span(self, span: Span, name: str, out: Any) -> None:
        """The last part, ``name``, is over."""
        self._pass_on(span, name, out)
        self._leave_span()
        self._kept = set()

    def _leave_span(self) -> None:
        if self._span is not None:
            self._span = self._run = None
            unset_hooks()

    # --- glue ----------------------------------------------------------------------------------

    def _open_glue(self, name: str, out: Any) -> None:
        """The code between two submodules begins."""
        step = self.program.steps[name]
        self._glue, self.region = step, name
        if step.again:
            site = self._sites[name]
            run = RegionRun(step, self.layer, self.program.windows, site, self.host)
            self.runs[name] = ref(run)
            run.arguments, self._kept = self._parents[site.glue.parent]
            self._kept |= {t.untyped_storage()._cdata for t in flatten(out)}
            reads: list[TapeStorage] = []
            for asked in site.asked:
                run.answers[asked], more = self._results[asked]
                reads += more
            run.reads = tuple(dict.fromkeys(reads))
            if step.draws:
                run.random = self.host.rng.capture()
            self._run = run
        if step.hooked:
            set_hooks(self.pack, unpack)

    def _close_glue(self, args: Any, kwargs: Any) -> None:
        """The submodule after it is called, with what the glue passes on."""
        run, step = self._run, self._glue
        self._leave_glue()
        if run is not None and step is not None and step.drops_output:
            with _past_modes():
                self._register_passed(run, step.name, (args, kwargs))
        self._kept = set()

    def _leave_glue(self) -> None:
        step, self._glue = self._glue, None
        if step is not None:
            self._run = None
            if step.hooked:
                unset_hooks()

    # --- the hook ------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves in a hooked part (Rule 1, Rule 2)."""
        run = self._run
        ordinal = 0
        if run is not None:
            ordinal, run.packs = run.packs, run.packs + 1
        if type(tensor) is not torch.Tensor:
            return tensor
        with _past_modes():
            held = tensor if is_weight(tensor) else self._reference(tensor, run, ordinal)
            if held is tensor and self.kept is not None:
                self.kept(tensor)
        return held

    def _reference(self, tensor: torch.Tensor, run: RegionRun | None, ordinal: int) -> Any:
        """``tensor`` by its storage if that is dropped, else itself."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            if run is None or not run.step.drops_saved or key in self._kept:
                return tensor
            known = self._register(run.make(run.step.label), storage)
        if run is not None and known[0].maker is run:
            run.saved.append((ordinal, ref(known[0])))
        return SavedTensor(known[0], tensor)

    # --- rebuilding ----------------------------------------------------------------------------

    def rebuild_label(self, label: str) -> None:
        """Rebuild what the plan calls ``label``, if it can be done without communication."""
        run = self.run_of(label)
        if run is not None:
            wanted = run.missing((label,))
            if wanted and (run.is_hollow(wanted) or run.is_quiet()):
                run.rebuild(wanted)

    def run_of(self, label: str) -> RegionRun | None:
        """The run behind a plan's label; None if nobody wants anything of it any more."""
        reference = self.runs.get(label)
        return None if reference is None else reference()

    def is_over(self) -> bool:
        """Whether nothing of it is wanted any more: its backward has run, or its graph is gone."""
        return all(reference() is None for reference in self.runs.values())

    def held_bytes(self) -> int:
        """Bytes that dropped parts still hold or want to read."""
        alive = {run for reference in self.runs.values() if (run := reference()) is not None}
        held = {storage._cdata: storage.nbytes() for run in alive for storage in run.held()}
        return sum(held.values())
