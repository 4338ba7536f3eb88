"""LayerProgram: what a tape does around each part of a layer, made from plan and graph once.

A tape costs what it drops: a part that the plan leaves alone has no step and is not wrapped, hooks of
autograd are set only while a part runs that saves something dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_lynx.graph import INPUT, LayerGraph
from megatron_lynx.layers.kind import Glue, LayerKind
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
class LayerProgram:
    """One layer's plan as a tape carries it out.

    Attributes:
        layer: global index of the layer.
        steps: the steps of the parts that are touched, by name.
        parents: paths of the modules whose glue runs again.
        windows: labels that are rebuilt in a window, so a replay on demand which could make them on the
            side leaves them to it.
    """

    layer: int
    steps: dict[str, Step] = field(default_factory=dict)
    parents: frozenset[str] = frozenset()
    windows: frozenset[str] = frozenset()


def layer_program(kind: LayerKind, graph: LayerGraph, plan: LayerPlan, *, drops_output: bool) -> LayerProgram:
    """The program of one layer; ``drops_output`` tells that the next layer's input is dropped.

    A layer's output is the next layer's input: it is dropped where that is, whatever the plan says of the
    part that makes it. To make it again, what that part reads and no backward does is dropped as well.
    """
    dropped = plan.dropped - {kind.output}
    if drops_output:
        ends = [n for n in graph.inputs_of(kind.output) if not any(s.saved_by for s in graph.produced_by(n))]
        dropped |= {kind.output, *ends} - {INPUT}
    savers = {r for s in graph.storages if s.producer in dropped for r in s.saved_by}
    steps = _steps(kind, graph, dropped, savers)
    return LayerProgram(
        layer=plan.layer,
        steps={name: step for name, step in steps.items() if step.touched},
        parents=frozenset(p.parent for p in kind.parts if isinstance(p, Glue) and steps[p.name].again),
        windows=frozenset(n for n, choice in plan.choices if isinstance(choice, Window)),
    )


def _steps(kind: LayerKind, graph: LayerGraph, dropped: frozenset[str], savers: set[str]) -> dict[str, Step]:
    masks, known = kind.masks(), set(graph.names)
    again = {name for name in kind.names if name in dropped or masks.get(name) in dropped}
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
            drops_output=name in dropped,
            drops_saved=label in dropped,
            hooked=name in savers,
            draws=region is not None and region.draws,
            communicates=region is not None and region.communicates,
            opens=next((g.name for g in glues if g.after == name), ""),
            closes=next((g.name for g in glues if g.before == name), ""),
            answers=name in answers,
        )
    return found


def stage_programs(kind: LayerKind, graph: LayerGraph, plan: StagePlan) -> dict[int, LayerProgram]:
    """The programs of a stage's layers, by global index."""
    found = {}
    for chunk in plan.chunks:
        for layer, following in zip(chunk, (*chunk[1:], None), strict=False):  # a chunk may be empty
            drops = following is not None and INPUT in plan.layer(following).dropped
            found[layer] = layer_program(kind, graph, plan.layer(layer), drops_output=drops)
    return found
