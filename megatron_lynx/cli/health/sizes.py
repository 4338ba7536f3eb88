"""Do the sizes fit each other: ranks, batch, heads, layers?"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.cli.health.facts import Check, Facts, Finding, fail, warn
from megatron_lynx.errors import ConfigError
from megatron_lynx.partition.layout import parse_layout

_NEEDED = (
    *(("num-layers", "24"), ("hidden-size", "2048"), ("num-attention-heads", "16"), ("seq-length", "2048")),
    *(("max-position-embeddings", "2048"), ("micro-batch-size", "1"), ("lr", "1.5e-4")),
)


def needed_flags(facts: Facts) -> Iterator[Finding]:
    """Flags without which Megatron stops, each with its own assertion."""
    if any(facts.has(name) for name in ("yaml-cfg", "use-checkpoint-args")) or not facts.gpt:
        return
    for name, example in _NEEDED:
        if not facts.has(name):
            yield fail(f"--{name} is missing; --{name} {example} is an example")
    if not facts.has("train-iters") and not facts.has("train-samples"):
        yield fail("--train-iters is missing; --train-iters 1000 is an example, or --train-samples")


def ranks(facts: Facts) -> Iterator[Finding]:
    """The world against the parallel sizes, and the batch against the replicas."""
    tp, pp, cp = facts.size("tensor-model"), facts.size("pipeline-model"), facts.size("context")
    replica, world = tp * pp * cp, facts.world_size
    per_node, gpus = facts.ranks_per_node, len(facts.machine.gpus)
    if per_node and gpus and per_node > gpus and not facts.cpu:
        yield fail(
            f"{per_node} ranks are to start on a node, and this one has {gpus} GPUs; {gpus} ranks a node work"
        )
    if world is None:
        return
    if world % replica:
        works = max(1, world // replica) * replica
        yield fail(
            f"{world} ranks are no multiple of TP {tp} x PP {pp}{f' x CP {cp}' if cp > 1 else ''} = "
            f"{replica}; "
            f"{works} ranks work"
        )
        return
    micro, batch = facts.number("micro-batch-size"), facts.number("global-batch-size")
    dp = world // replica
    if micro and batch and batch % (micro * dp):
        works = -(-batch // (micro * dp)) * micro * dp
        yield fail(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {micro} x {dp} replicas; "
            f"--global-batch-size {works} works"
        )
    virtual = facts.namespace.virtual_pipeline_model_parallel_size or 1
    if micro and batch and virtual > 1 and batch // (micro * dp) % pp:
        yield fail(
            "interleaved stages need microbatches in multiples of --pipeline-model-parallel-size "
            f"{pp}, there are "
            f"{batch // (micro * dp)}; --global-batch-size {pp * micro * dp} works"
        )


def shape(facts: Facts) -> Iterator[Finding]:
    """Heads and sequence against tensor parallelism."""
    tp, heads = facts.size("tensor-model"), facts.number("num-attention-heads")
    groups = facts.number("num-query-groups") if facts.has("group-query-attention") else None
    hidden, length = facts.number("hidden-size"), facts.number("seq-length")
    if heads and heads % tp:
        yield fail(f"--num-attention-heads {heads} is no multiple of --tensor-model-parallel-size {tp}")
    if heads and hidden and hidden % heads and not facts.has("kv-channels"):
        yield fail(f"--hidden-size {hidden} is no multiple of --num-attention-heads {heads}")
    if groups and heads and heads % groups:
        yield fail(f"--num-attention-heads {heads} is no multiple of --num-query-groups {groups}")
    if facts.has("sequence-parallel") and length and length % tp:
        yield fail(f"--sequence-parallel: --seq-length {length} is no multiple of TP {tp}")
    positions = facts.number("max-position-embeddings")
    if positions and length and positions < length:
        yield fail(f"--max-position-embeddings {positions} is below --seq-length {length}; {length} works")


def layers(facts: Facts) -> Iterator[Finding]:
    """Layers against the stages."""
    count, pp = facts.number("num-layers"), facts.size("pipeline-model")
    layout = facts.text("pipeline-model-parallel-layout")
    if count is None:
        return
    if layout is not None:
        try:
            parse_layout(layout, pp).check_num_layers(count)
        except ConfigError as error:
            yield fail(str(error))
        for other in ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):
            if facts.has(other):
                yield fail(
                    f"--pipeline-model-parallel-layout and --{other} exclude each other; leave --{other} out"
                )
        return
    first, last = (facts.number(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    inner = pp - (first is not None) - (last is not None)
    rest = count - (first or 0) - (last or 0)
    if facts.has("account-for-embedding-in-pipeline-split"):
        rest += 1
    if facts.has("account-for-loss-in-pipeline-split"):
        rest += 1
    if inner > 0 and rest % inner:
        yield fail(
            f"--num-layers {count} leaves {rest} layers for {inner} pipeline stages; a multiple works, or "
            "--pipeline-model-parallel-layout (`lynx plan --partition search` finds one)"
        )
    per_stage = facts.number("num-layers-per-virtual-pipeline-stage")
    if per_stage and inner and not rest % inner and (rest // inner) % per_stage:
        yield fail(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide {rest // inner} "
            "layers of a stage"
        )


def connections(facts: Facts) -> Iterator[Finding]:
    """The order of launches on a GPU, which tensor and sequence parallelism rely on."""
    value = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if facts.size("tensor-model") == 1 or facts.cpu or value == "1":
        return
    found = f"is {value}" if value else "is not set"
    told = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    if facts.has("sequence-parallel"):
        yield fail(
            f"CUDA_DEVICE_MAX_CONNECTIONS {found}, and --sequence-parallel needs 1 before Blackwell: {told}"
        )
    else:
        yield warn(
            f"CUDA_DEVICE_MAX_CONNECTIONS {found}: collectives may start late and hide nothing: {told}"
        )


CHECKS: tuple[Check, ...] = (needed_flags, ranks, shape, layers, connections)
