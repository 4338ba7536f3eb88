"""LayerProgram: what a tape does around each part of a layer, made from plan and graph once.

A tape costs what it drops: a part that the plan leaves alone has no step and is not wrapped, hooks of
autograd are set only while a part runs that saves something dropped. Where a layer drops everything up to
some part, and all of it on demand, those parts run again as one (``Span``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.layers.kind import Glue, Inner, LayerKind, Mask
from megatron_lynx.plan import LayerPlan, StagePlan, Window


@dataclass(frozen=True, slots=True)
class Step:
    """What a tape does around one part.

    Attributes:
        name: the part.
        label: the plan's name of what the part saves of its own: itself, or the mask drawn inside it.
        drops_output, drops_saved: whether what it passes on, and what it saves of its own, is dropped.
        hooked: whether autograd saves something that is dropped while it runs.
        draws, communicates: as in the graph.
        opens, closes: the glue that begins when it has run, and the one that ends before it.
        answers: whether another part that runs again gets this one's result from memory.
    """

    name: str
    label: str
    drops_output: bool = False
    drops_saved: bool = False
    hooked: bool = False
    draws: bool = False
    communicates: bool = False
    opens: str = ""
    closes: str = ""
    answers: bool = False

    @property
    def again(self) -> bool:
        """Whether it may have to run again."""
        return self.drops_output or self.drops_saved

    @property
    def touched(self) -> bool:
        """Whether there is anything to do around it."""
        return self.again or self.hooked or self.answers or bool(self.opens or self.closes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The parts from a layer's start on that are dropped and rebuilt on demand, as far as every one is.

    Whoever needs the last of them needs them all, so one run of the layer's own forward, from its input,
    does what a run of each would do, at the host's cost of one.

    Attributes:
        step: the span as one part.
        parts: names of its parts.
        last: the last of them, with which it ends.
        passes: those whose output somebody outside the span saves or needs to run again.
        closes: by part that must be seen, the glue of the span that ends before it and is the last or passes
            something on; empty where it is the part's own end that matters.
    """

    step: Step
    parts: frozenset[str]
    last: str
    passes: frozenset[str]
    closes: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProgram:
    """One layer's plan as a tape carries it out.

    Attributes:
        layer: global index of the layer.
        steps: the steps of the parts that are touched, by name. Of a span's parts only those that something
            must be taken from have one.
        parents: paths of the modules whose glue runs again.
        windows: labels that are rebuilt in a window, so a replay on demand which could make them on the
            side leaves them to it.
        span: what runs again as one.
    """

    layer: int
    steps: dict[str, Step] = field(default_factory=dict)
    parents: frozenset[str] = frozenset()
    windows: frozenset[str] = frozenset()
    span: Span | None = None


def layer_program(
    kind: LayerKind, graph: LayerGraph, plan: LayerPlan, *, drops_output: bool, known: bool = True
) -> LayerProgram:
    """The program of one layer; ``drops_output`` tells that the next layer's input is dropped, ``known`` that
    nothing in the layer is but what its kind describes: only then more than a part runs at once.

    A layer's output is the next layer's input: it is dropped where that is, whatever the plan says of the
    part that makes it. To make it again, what that part reads and no backward does is dropped as well.
    """
    dropped = plan.dropped - {kind.output}
    if drops_output:
        ends = [n for n in graph.inputs_of(kind.output) if not any(s.saved_by for s in graph.produced_by(n))]
        dropped |= {kind.output, *ends} - {INPUT}
    windows = frozenset(name for name, choice in plan.choices if isinstance(choice, Window))
    span = None if windows or not known else _span(kind, graph, dropped)
    steps = _steps(kind, graph, dropped, span)
    seen = span.closes if span else {}
    return LayerProgram(
        layer=plan.layer,
        steps={name: step for name, step in steps.items() if step.touched or name in seen},
        parents=frozenset(p.parent for p in kind.parts if isinstance(p, Glue) and steps[p.name].again),
        windows=windows,
        span=span,
    )


def _span(kind: LayerKind, graph: LayerGraph, dropped: frozenset[str]) -> Span | None:
    """The span of a layer, if there are two parts or more to run as one."""
    known = set(graph.names)
    inside = {part.name: part.inside for part in kind.parts if isinstance(part, Mask | Inner)}
    names = list(takewhile(lambda name: name in dropped or name not in known, kind.names))

    asked: dict[str, set[str]] = {}  # by what makes something, who saves it or runs again from it
    for storage in graph.storages:
        again = dropped & {*graph.readers(storage.name)}
        asked.setdefault(storage.producer, set()).update(again, storage.saved_by)

    def makes_something(name: str) -> bool:
        makers = {name, *(inner for inner, outer in inside.items() if outer == name)}
        return name == kind.output or any(asked.get(maker) for maker in makers)

    while names and (names[-1] in inside or not makes_something(names[-1])):
        names.pop()
    if sum(name not in inside for name in names) < 2:
        return None
    regions = [graph.region(name) for name in names if name in known]
    label = f"{names[0]} to {names[-1]}"
    step = Step(
        name=label,
        label=label,
        drops_output=True,
        drops_saved=True,
        hooked=True,
        draws=any(region.draws for region in regions),
        communicates=any(region.communicates for region in regions),
    )
    passes = {name for name in names if name == kind.output or asked.get(name, set()) - {*names}}
    taken = {*passes, names[-1]}
    glue = {part.name: part.before for part in kind.parts if isinstance(part, Glue)}
    closes = {name: "" for name in taken if name not in glue}
    closes |= {glue[name]: name for name in taken if name in glue}
    return Span(step=step, parts=frozenset(names), last=names[-1], passes=frozenset(passes), closes=closes)


def _steps(kind: LayerKind, graph: LayerGraph, dropped: frozenset[str], span: Span | None) -> dict[str, Step]:
    masks, known = kind.masks(), set(graph.names)
    within = span.parts if span else frozenset()
    savers = {r for s in graph.storages if s.producer in dropped for r in s.saved_by} - within
    again = {name for name in kind.names if name in dropped or masks.get(name) in dropped} - within
    glues = [p for p in kind.parts if isinstance(p, Glue) and p.name in again | savers]
    answers = {inner for outer, inner in kind.inner().items() if outer in again}
    answers |= {part.name for glue in glues if glue.name in again for part in kind.called_before(glue)}
    found = {}
    for name in kind.names:
        if name in masks.values():
            continue
        label = masks.get(name, name)
        region = graph.region(name) if name in known else None
        found[name] = Step(
            name=name,
            label=label,
            drops_output=name in dropped and name not in within,
            drops_saved=label in dropped and name not in within,
            hooked=name in savers,
            draws=region is not None and region.draws,
            communicates=region is not None and region.communicates,
            opens=next((g.name for g in glues if g.after == name), ""),
            closes=next((g.name for g in glues if g.before == name), ""),
            answers=name in answers,
        )
    return found


def stage_programs(
    kind: LayerKind, graph: LayerGraph, plan: StagePlan, strange: Collection[int] = ()
) -> dict[int, LayerProgram]:
    """The programs of a stage's layers, by global index; ``strange`` are those with something in them that
    ``kind`` does not describe."""
    found = {}
    for chunk in plan.chunks:
        for layer, following in zip(chunk, (*chunk[1:], None), strict=False):  # a chunk may be empty
            drops = following is not None and INPUT in plan.layer(following).dropped
            found[layer] = layer_program(
                kind, graph, plan.layer(layer), drops_output=drops, known=layer not in strange
            )
    return found
