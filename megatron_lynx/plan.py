"""Plan: what each stage keeps, and in which window it rebuilds the rest.

Planners write plans, the simulator and the runtime read them, people diff them. A plan has a text
form and a JSON form; ``parse_plan(str(plan)) == plan`` and ``Plan.from_json(plan.to_json()) ==
plan``.

The text form, one line a layer, regions that are kept left out::

    lynx-plan 2 windows 1f0c9a5e7d3b2468
    job hidden_size=1024 num_attention_heads=16 swiglu=false ...
    layout Et*2|t*2L
    stage 0 chunks 0-1
      layer 0: input_layernorm=bwd:1:linear_qkv core_attention=demand
      layer 1: keep
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from megatron_lynx.errors import PlanError
from megatron_lynx.graph import LayerGraph
from megatron_lynx.spec import Batch, Facts, Model, Parallel, differing, job_facts

SCHEMA = 2
KEEP: Final = "keep"
DEMAND: Final = "demand"
WindowKind = Literal["fwd", "bwd", "head", "stall"]
_WINDOW = re.compile(r"(fwd|bwd):(\d+):([a-z0-9_.]+)|head|stall")


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """An interval in which the compute stream would wait for a link.

    ``fwd`` and ``bwd`` are tensor-parallel collectives of global layer ``layer`` (``slot`` names
    which, see ``gpt.forward_slots`` and ``gpt.backward_slots``); ``head`` is the collective of the
    output layer's input gradient, just before the last layer's backward; ``stall`` is a pipeline
    wait before a backward. Text form: ``fwd:3:linear_proj``, ``head``, ``stall``.
    """

    kind: WindowKind
    layer: int = -1
    slot: str = ""

    def __str__(self) -> str:
        return self.kind if self.layer < 0 else f"{self.kind}:{self.layer}:{self.slot}"


Choice = Window | Literal["keep", "demand"]
"""Keep a region's storages, rebuild them in a window, or rebuild them on demand."""


def parse_choice(text: str) -> Choice:
    """The inverse of ``str`` on a choice.

    Raises:
        PlanError: not ``keep``, ``demand`` or a window.
    """
    if text == KEEP:
        return KEEP
    if text == DEMAND:
        return DEMAND
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise PlanError(
            f"choice {text!r} is not keep, demand or a window (stall, head, fwd:LAYER:SLOT or bwd:LAYER:SLOT)"
        )
    if match.group(1) is None:
        return Window("head") if text == "head" else Window("stall")
    return Window("fwd" if match.group(1) == "fwd" else "bwd", int(match.group(2)), match.group(3))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Choices of one layer; a region that is not named is kept.

    ``layer`` is the global index, from 0. ``choices`` holds no ``keep`` and is in forward order.
    """

    layer: int
    choices: tuple[tuple[str, Choice], ...] = ()

    def choice(self, region: str) -> Choice:
        """What happens to ``region``: ``keep`` unless the plan says otherwise."""
        return dict(self.choices).get(region, KEEP)

    @property
    def dropped(self) -> frozenset[str]:
        """Regions whose storages are not kept."""
        return frozenset(name for name, choice in self.choices if choice != KEEP)

    def __str__(self) -> str:
        listed = " ".join(f"{name}={choice}" for name, choice in self.choices) or KEEP
        return f"layer {self.layer}: {listed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline rank: its model chunks (global layer indices each) and its layers' choices."""

    stage: int
    chunks: tuple[tuple[int, ...], ...]
    layers: tuple[LayerPlan, ...]

    def __post_init__(self) -> None:
        owned = [layer for chunk in self.chunks for layer in chunk]
        if [plan.layer for plan in self.layers] != owned:
            raise PlanError(f"stage {self.stage}: layers differ from its chunks {self.chunks}")

    def layer(self, index: int) -> LayerPlan:
        """The plan of global layer ``index``; ``KeyError`` if it is not of this stage."""
        for plan in self.layers:
            if plan.layer == index:
                return plan
        raise KeyError(index)

    def windows(self) -> dict[Window, tuple[tuple[int, str], ...]]:
        """For each window, the (layer, region) pairs to rebuild in it: layers last first, regions
        in forward order, so that what a region reads is rebuilt before it."""
        due: dict[Window, list[tuple[int, str]]] = {}
        for plan in reversed(self.layers):
            for region, choice in plan.choices:
                if isinstance(choice, Window):
                    due.setdefault(choice, []).append((plan.layer, region))
        return {window: tuple(pairs) for window, pairs in due.items()}

    def __str__(self) -> str:
        chunks = " ".join(_span(chunk) for chunk in self.chunks)
        lines = [f"stage {self.stage} chunks {chunks}".rstrip()]
        return "\n".join(lines + [f"  {layer}" for layer in self.layers])


def _span(chunk: tuple[int, ...]) -> str:
    if not chunk:
        return "-"
    return f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else str(chunk[0])


def _parse_span(text: str) -> tuple[int, ...]:
    if text == "-":
        return ()
    first, _, last = text.partition("-")
    return tuple(range(int(first), int(last or first) + 1))


def relabel(plan: StagePlan, chunks: tuple[tuple[int, ...], ...]) -> StagePlan:
    """The same plan for other global layer indices, chunk by chunk."""
    old = [layer for chunk in plan.chunks for layer in chunk]
    names = dict(zip(old, [layer for chunk in chunks for layer in chunk], strict=True))
    layers = []
    for layer in plan.layers:
        choices = tuple(
            (region, replace(c, layer=names[c.layer]) if isinstance(c, Window) and c.layer >= 0 else c)
            for region, c in layer.choices
        )
        layers.append(LayerPlan(layer=names[layer.layer], choices=choices))
    return StagePlan(stage=plan.stage, chunks=chunks, layers=tuple(layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a whole job: one StagePlan per pipeline rank.

    ``planner`` names who made it, ``fingerprint`` the job it was made for (see ``fingerprint``), ``job``
    is the same in words (``spec.job_facts``; empty where nobody wrote it down), ``layout`` is Megatron's
    ``--pipeline-model-parallel-layout``, or None for its even split.
    """

    planner: str
    fingerprint: str
    stages: tuple[StagePlan, ...]
    layout: str | None = None
    job: Facts = field(default_factory=dict, hash=False)

    def __iter__(self) -> Iterator[StagePlan]:
        return iter(self.stages)

    def __str__(self) -> str:
        head = [f"lynx-plan {SCHEMA} {self.planner} {self.fingerprint}"]
        if self.job:
            head.append("job " + " ".join(f"{k}={json.dumps(v)}" for k, v in self.job.items()))
        if self.layout is not None:
            head.append(f"layout {self.layout}")
        return "\n".join(head + [str(stage) for stage in self.stages]) + "\n"

    def to_json(self) -> str:
        """The JSON form, with a schema version."""
        stages = [
            {
                "stage": stage.stage,
                "chunks": [list(chunk) for chunk in stage.chunks],
                "layers": [
                    {"layer": p.layer, "choices": {name: str(c) for name, c in p.choices}}
                    for p in stage.layers
                ],
            }
            for stage in self.stages
        ]
        head = {"schema": SCHEMA, "planner": self.planner, "fingerprint": self.fingerprint}
        whole = {**head, "job": dict(self.job), "layout": self.layout, "stages": stages}
        return json.dumps(whole, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the JSON form.

        Raises:
            PlanError: not JSON, another schema, or a field missing or malformed.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data["schema"] != SCHEMA:
                raise PlanError(f"plan schema {data['schema']} is unknown; this reads {SCHEMA}")
            stages = tuple(
                StagePlan(
                    stage=stage["stage"],
                    chunks=tuple(tuple(chunk) for chunk in stage["chunks"]),
                    layers=tuple(
                        LayerPlan(
                            layer=p["layer"],
                            choices=tuple((n, parse_choice(c)) for n, c in p["choices"].items()),
                        )
                        for p in stage["layers"]
                    ),
                )
                for stage in data["stages"]
            )
            return cls(
                planner=data["planner"],
                fingerprint=data["fingerprint"],
                layout=data["layout"],
                job=dict(data["job"]),
                stages=stages,
            )
        except PlanError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"not a plan in JSON form: {error!r}") from error


def parse_plan(text: str) -> Plan:
    """Read a plan in either form: text or JSON.

    Raises:
        PlanError: the line that does not fit is quoted.
    """
    if text.lstrip().startswith("{"):
        return Plan.from_json(text)
    lines = text.splitlines()
    head = re.fullmatch(r"lynx-plan (\d+) (\S+) (\S+)", lines[0]) if lines else None
    if head is None or int(head.group(1)) != SCHEMA:
        raise PlanError(f"not a plan: the first line is not 'lynx-plan {SCHEMA} PLANNER HASH'")
    layout: str | None = None
    job: Facts = {}
    stages: list[tuple[int, tuple[tuple[int, ...], ...], list[LayerPlan]]] = []
    for line in lines[1:]:
        words = line.split()
        try:
            if not words:
                continue
            if words[0] == "layout":
                layout = line[len("layout ") :]
            elif words[0] == "job":
                job = {name: json.loads(v) for name, v in (word.split("=", 1) for word in words[1:])}
            elif words[0] == "stage" and words[2] == "chunks":
                stages.append((int(words[1]), tuple(map(_parse_span, words[3:])), []))
            elif words[0] == "layer":
                pairs = [word.split("=", 1) for word in words[2:] if word != KEEP]
                choices = tuple((name, parse_choice(choice)) for name, choice in pairs)
                stages[-1][2].append(LayerPlan(layer=int(words[1].rstrip(":")), choices=choices))
            else:
                raise ValueError("unknown line")
        except (ValueError, IndexError) as error:
            raise PlanError(f"plan line {line!r} does not fit: {error}") from error
    return Plan(
        planner=head.group(2),
        fingerprint=head.group(3),
        layout=layout,
        job=job,
        stages=tuple(
            StagePlan(stage=stage, chunks=chunks, layers=tuple(layers)) for stage, chunks, layers in stages
        ),
    )


def fingerprint(model: Model, parallel: Parallel, batch: Batch, graph: LayerGraph) -> str:
    """A hash of the job that a plan is for (``spec.job_facts``) and of what a layer is described as; the
    runtime refuses a plan that differs."""
    facts = {**job_facts(model, parallel, batch), "graph": graph.fingerprint()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def check_job_of(plan: Plan, model: Model, parallel: Parallel, batch: Batch, graph: LayerGraph) -> None:
    """Check that ``plan`` was made for this job.

    Raises:
        PlanError: says what differs.
    """
    if plan.fingerprint == fingerprint(model, parallel, batch, graph):
        return
    different = differing(plan.job, job_facts(model, parallel, batch)) if plan.job else ""
    if not different:
        different = "another version of megatron_lynx, which counts other bytes for a layer"
    raise PlanError(
        f"the plan was made for another job: {different}; `lynx plan` with this job's flags works"
    )
