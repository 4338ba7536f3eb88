"""Faults to plant into a sound plan: each is a plan in text form, and what the refusal must name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_lynx.layers import kind_of
from megatron_lynx.plan import Choice, LayerPlan, Plan, StagePlan, Window
from megatron_lynx.search.workflow import Job

Fault = tuple[str, str, tuple[str, ...]]
"""What is wrong, the text of the plan, and parts of the message."""


def planted(job: Job, plan: Plan) -> Iterator[Fault]:
    """Faults in ``plan``, which is sound for ``job``; its layers drop what they like."""
    yield from _in_the_text(plan)
    yield from _in_the_stages(plan)
    for stage in plan.stages:
        for layer in stage.layers:
            for what, changed, parts in _in_a_layer(job, stage, layer):
                yield what, str(_with(plan, stage, changed)), (f"layer {layer.layer}", *parts)


def _with(plan: Plan, stage: StagePlan, layer: LayerPlan) -> Plan:
    layers = tuple(layer if one.layer == layer.layer else one for one in stage.layers)
    stages = tuple(replace(one, layers=layers) if one is stage else one for one in plan.stages)
    return replace(plan, stages=stages)


def _in_the_text(plan: Plan) -> Iterator[Fault]:
    lines = str(plan).splitlines(keepends=True)
    yield "an empty file", "", ("not a plan",)
    yield "another file", "loss: 3.0\n", ("not a plan",)
    yield "an old schema", str(plan).replace("lynx-plan 2", "lynx-plan 1", 1), ("not a plan",)
    yield "a line of rubbish", "".join([*lines, "rebuild it all\n"]), ("rebuild it all",)
    yield "half a JSON file", plan.to_json()[: len(plan.to_json()) // 2], ("JSON",)
    wrong = next(n for n, line in enumerate(lines) if line.startswith("  layer"))
    for text in ("linear_qkv=soon", "linear_qkv", "linear_qkv=bwd:0", "linear_qkv=fwd:x:linear_proj"):
        broken = [*lines]
        broken[wrong] = f"{lines[wrong].split(':')[0]}: {text}\n"
        yield f"the choice {text}", "".join(broken), (text.partition("=")[2] or text,)
    renamed = [line.replace("layer 0:", "layer zero:") for line in lines]
    yield "a layer that is no number", "".join(renamed), ("layer zero",)
    missing = [line for n, line in enumerate(lines) if n != wrong]
    yield "a layer that is missing", "".join(missing), ("layers differ",)
    facts = ("hidden_size", "seq_length", "micro_batch_size", "num_layers", "num_attention_heads")
    for name in (*facts, "tensor_model_parallel_size", "ffn_hidden_size"):
        job = {**plan.job, name: int(plan.job[name]) * 2}
        other = replace(plan, fingerprint="0" * 16, job=job)
        flag = "--" + name.replace("_", "-")
        yield f"another {name}", str(other), (flag, str(job[name]), str(plan.job[name]))
    for name in ("swiglu", "hidden_dropout", "sequence_parallel"):
        other = replace(plan, fingerprint="0" * 16, job={**plan.job, name: not plan.job[name]})
        yield f"another {name}", str(other), ("--" + name.replace("_", "-"), "yes", "no")
    yield "another version", str(replace(plan, fingerprint="0" * 16)), ("another version of megatron_lynx",)


def _in_the_stages(plan: Plan) -> Iterator[Fault]:
    first, *others = plan.stages
    yield "a stage too few", str(replace(plan, stages=tuple(others))), ("stages",)
    yield "a stage twice", str(replace(plan, stages=(first, *plan.stages))), ("stages",)
    numbers = tuple(replace(one, stage=one.stage + 1) for one in plan.stages)
    yield "stages from 1", str(replace(plan, stages=numbers)), ("numbers its stages",)
    if others:
        swapped = (replace(others[0], stage=0), replace(first, stage=1), *others[1:])
        yield "stages swapped", str(replace(plan, stages=swapped)), ("gives stage 0 the layers",)
        moved = first.chunks[-1][-1]
        less = replace(first, chunks=(*first.chunks[:-1], first.chunks[-1][:-1]), layers=first.layers[:-1])
        more = replace(
            others[0],
            chunks=((moved, *others[0].chunks[0]), *others[0].chunks[1:]),
            layers=(LayerPlan(layer=moved), *others[0].layers),
        )
        yield "a layer moved", str(replace(plan, stages=(less, more, *others[1:]))), ("gives stage 0",)


def _in_a_layer(
    job: Job, stage: StagePlan, plan: LayerPlan
) -> Iterator[tuple[str, LayerPlan, tuple[str, ...]]]:
    kind = kind_of(job.model)
    slots = kind.backward_slots(job.parallel)
    chunk = next(chunk for chunk in stage.chunks if plan.layer in chunk)
    last = stage.stage == job.parallel.pp - 1
    norm, *_, output = job.graph.names[1:]
    loud = next(region.name for region in job.graph.regions[1:] if region.communicates)

    def only(region: str, choice: Choice) -> LayerPlan:
        return replace(plan, choices=((region, choice),))

    yield "a misspelt region", only(norm[:-1], "demand"), (norm[:-1], f"{norm} works")
    yield "a region of elsewhere", only("router", "demand"), ("router",)
    yield "a region twice", replace(plan, choices=((norm, "demand"),) * 2), (norm, "twice")
    wrong: tuple[tuple[str, Choice], ...] = ((output, "demand"), (norm, "demand"))
    yield "another order", replace(plan, choices=wrong), (norm, "forward order works")
    yield "layer 77", only(norm, Window("bwd", 77, slots[0])), ("layer 77",)
    for other in [k for k in range(job.model.num_layers) if k not in chunk][:1]:
        yield "a window of elsewhere", only(norm, Window("bwd", other, slots[0])), (f"layer {other}",)
    yield "a slot of elsewhere", only(norm, Window("bwd", plan.layer, output)), ("no such window",)
    yield "a loud region", only(loud, Window("bwd", plan.layer, slots[0])), (loud, "communicates")
    if plan.layer > chunk[0]:
        yield "too late", only(norm, Window("bwd", chunk[0], slots[0])), ("after the region is needed",)
        yield "an input of nowhere", only("input", "demand"), ("input", "keeps")
    else:
        yield "the first input", only("input", "demand"), ("input", "first of its model chunk")
    yield "an input in a window", only("input", Window("bwd", plan.layer, slots[0])), ("input", "collective")
    if last:
        yield "a stall at the end", only(norm, Window("stall")), ("stall", "never waits")
        yield (
            "a forward window",
            only(norm, Window("fwd", plan.layer, kind.forward_slots(job.parallel)[0])),
            (
                "fwd",
                "no forward pass",
            ),
        )
    else:
        yield "a head in the middle", only(norm, Window("head")), ("head", "last stage")
