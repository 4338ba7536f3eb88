"""Binds an executor to the layers of a model: which piece of the real layer is which part of its kind.

The layer's own code stays as it is. What a plan touches gets another ``forward`` on the instance, below
module hooks, so that a hook of the user's runs once per forward pass and never for a replay. What a plan
leaves alone is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from megatron.core import utils as megatron_utils

from megatron_lynx.errors import ConfigError
from megatron_lynx.layers import KINDS
from megatron_lynx.layers.kind import Glue, Inner, LayerKind, Operation, Submodule
from megatron_lynx.runtime.executor import Executor
from megatron_lynx.runtime.glue import GlueSite
from megatron_lynx.runtime.quiet import QuietCall
from megatron_lynx.spec import Parallel

Undo = Callable[[], None]


class Watcher(Protocol):
    """What stands behind wrapped parts: ``active`` is told of each that runs, where it is set."""

    active: Any

    def run_layer(self, layer: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A layer runs."""


def transformer_layers(chunks: Sequence[Any]) -> list[list[Any]]:
    """The decoder layers of each model chunk, in order. Those of multi-token prediction are left alone."""
    classes = {kind.layer_class for kind in KINDS.values()}
    return [
        [
            module
            for name, module in chunk.named_modules()
            if any(base.__name__ in classes for base in type(module).__mro__) and "mtp" not in name.split(".")
        ]
        for chunk in chunks
    ]


def layers_of(chunks: Sequence[Any]) -> list[Any]:
    """The decoder layers of all model chunks, in order."""
    return [layer for layers in transformer_layers(chunks) for layer in layers]


def layer_index(layer: Any) -> int:
    """The global index of a layer, from 0."""
    return int(layer.layer_number) - 1


def owned_layers(chunks: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Global indices of the layers of each model chunk."""
    return tuple(tuple(map(layer_index, layers)) for layers in transformer_layers(chunks))


def kind_of_layer(layer: Any) -> LayerKind:
    """The kind of a real layer: the one whose parts it has."""
    kind = min(KINDS.values(), key=lambda kind: len(unknown_parts(layer, kind)))
    return kind.having(layer.config)


def unknown_parts(layer: Any, kind: LayerKind) -> dict[str, str]:
    """Submodules of ``kind`` that ``layer`` has not, or in which it has something that was not tested: the
    part's name, and the name of the class that is there."""
    found = {}
    for part in kind.parts:
        if isinstance(part, Submodule):
            there = _class_at(layer, part.path)
            if there not in part.classes:
                found[part.name] = there
    return found


def weight_of(layer: Any, path: str) -> Any:
    """The weight of the linear at ``path``, inside whatever is wrapped around it: the largest of its
    parameters."""
    return max(layer.get_submodule(path).parameters(), key=lambda parameter: parameter.numel())


def slots_of(layer: Any, parallel: Parallel) -> tuple[str, ...]:
    """The waits in the backward of a real layer: a frozen linear needs its input no more, so that it is not
    gathered again."""
    kind = kind_of_layer(layer)
    linears = ((n, path) for n, path in kind.gemms().items() if [*layer.get_submodule(path).parameters()])
    frozen = {name for name, path in linears if not weight_of(layer, path).requires_grad}
    skipped = {f"{name}.gather" for name in frozen}
    return tuple(slot for slot in kind.backward_slots(parallel) if slot not in skipped)


def _class_at(layer: Any, path: str) -> str:
    """The name of the class of the submodule at ``path``; empty if there is none."""
    try:
        return type(layer.get_submodule(path)).__name__
    except AttributeError:
        return ""


def bind(chunks: Sequence[Any], executor: Executor) -> Undo:
    """Wrap what the executor's plan touches; returns the function that takes the wraps off again.

    Raises:
        ConfigError: a layer is not supported, or the layers are not those of the plan.
    """
    owned = owned_layers(chunks)
    if owned != executor.plan.chunks:
        raise ConfigError(
            f"--lynx-plan gives stage {executor.plan.stage} the layers {executor.plan.chunks}, the model "
            f"has {owned}; pass --pipeline-model-parallel-layout as the plan's second line says"
        )
    undos: list[Undo] = []
    for layer in layers_of(chunks):
        index, kind = layer_index(layer), kind_of_layer(layer)
        if not executor.watches(index):
            continue
        program = executor.programs[index]
        again = [p for p in kind.parts if p.name in program.steps and program.steps[p.name].again]
        executor.sites[index] = {
            p.name: _site(layer, p, kind, executor) for p in again if isinstance(p, Glue)
        }
        for part in again:
            if isinstance(part, Submodule) and (inside := list(layer.get_submodule(part.path).modules())[1:]):
                module = layer.get_submodule(part.path)
                call = QuietCall(module.forward, inside, [module], without_ranges)
                executor.sites[index][part.name] = call
        if program.span is not None:
            parents = [layer.get_submodule(path) for path in kind.glue_parents()]
            call = QuietCall(layer.forward, list(layer.modules())[1:], [layer, *parents], without_ranges)
            executor.sites[index][program.span.step.name] = call
        missing = {name for name, there in unknown_parts(layer, kind).items() if not there}
        wanted = {n for n in kind.names if n in program.steps or executor.hears(n)} - missing
        undos += wrap_layer(layer, kind, executor, wanted | program.parents)
    return _all(undos)


def bind_everything(chunks: Sequence[Any], watcher: Watcher) -> Undo:
    """Wrap every part of every layer, for whoever measures; returns what takes the wraps off."""
    undos: list[Undo] = []
    for layer in layers_of(chunks):
        kind = kind_of_layer(layer)
        undos += wrap_layer(layer, kind, watcher, {*kind.names, *kind.glue_parents()})
    return _all(undos)


def _all(undos: Sequence[Undo]) -> Undo:
    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def wrap_layer(layer: Any, kind: LayerKind, watcher: Watcher, wanted: set[str]) -> list[Undo]:
    """Wrap a layer and those of its parts and parents (by path) that are ``wanted``."""
    index, forward = layer_index(layer), layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return forward(*args, **kwargs)
        return watcher.run_layer(index, forward, args, kwargs)

    undos = [_set(layer, "forward", run)]
    for path in sorted(kind.glue_parents() & wanted):
        module = layer.get_submodule(path)
        undos.append(_set(module, "forward", _parent(path, module.forward, watcher)))
    for part in kind.parts:
        if part.name not in wanted:
            continue
        if isinstance(part, Submodule):
            module = layer.get_submodule(part.path)
            undos.append(_set(module, "forward", watched(part.name, module.forward, watcher)))
        elif isinstance(part, Operation):
            factory = getattr(layer, part.attribute)
            undos.append(_set(layer, part.attribute, _operation(part.name, factory, watcher)))
    return undos


def inner_functions() -> dict[str, dict[str, str]]:
    """Functions that run inside parts of some kind: dotted path -> part that it runs inside -> its name."""
    found: dict[str, dict[str, str]] = {}
    for kind in KINDS.values():
        for part in kind.parts:
            if isinstance(part, Inner):
                found.setdefault(part.function, {})[part.inside] = part.name
    return found


def _site(layer: Any, glue: Glue, kind: LayerKind, executor: Executor) -> GlueSite:
    """Where ``glue`` of ``layer`` runs again, before anything of the layer is wrapped."""
    parent = layer.get_submodule(glue.parent)
    last = kind.names.index(glue.before)
    parts = [
        p
        for p in kind.parts[: last + 1]
        if isinstance(p, Submodule) and p.path.rpartition(".")[0] == glue.parent
    ]
    submodules = {p.name: (p.path.rpartition(".")[2], layer.get_submodule(p.path)) for p in parts}
    return GlueSite(glue, parent, parent.forward, submodules, executor, without_ranges)


@contextlib.contextmanager
def without_ranges() -> Iterator[None]:
    """Inside, Megatron opens no ranges for profilers: a replay may leave its code in the middle of one."""
    before = megatron_utils._nvtx_enabled
    megatron_utils._nvtx_enabled = False
    try:
        yield
    finally:
        megatron_utils._nvtx_enabled = before


def _set(owner: Any, name: str, value: Any) -> Undo:
    """Shadow an attribute on the instance; returns the function that uncovers it."""
    shadowed = owner.__dict__.get(name)
    object.__setattr__(owner, name, value)

    def undo() -> None:
        if shadowed is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, shadowed)

    return undo


def _parent(name: str, forward: Callable[..., Any], watcher: Watcher) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        active = watcher.active
        return forward(*args, **kwargs) if active is None else active.parent(name, forward, args, kwargs)

    return run


def watched(name: str, forward: Callable[..., Any], watcher: Watcher) -> Callable[..., Any]:
    """``forward``, of which the watcher's ``active`` is told under ``name``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        active = watcher.active
        return forward(*args, **kwargs) if active is None else active.record(name, forward, args, kwargs)

    return run


def _operation(name: str, factory: Callable[..., Any], watcher: Watcher) -> Callable[..., Any]:
    """``layer.self_attn_bda`` is a factory: called with (training, fused) it returns the operation."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return watched(name, factory(*args, **kwargs), watcher)

    return make
