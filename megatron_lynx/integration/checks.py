"""What a layer holds that its kind does not describe: refused where a result could differ, else kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_lynx.errors import ConfigError
from megatron_lynx.integration.agree import gathered
from megatron_lynx.integration.binding import kind_of_layer, layer_index, layers_of, unknown_parts
from megatron_lynx.layers.kind import Glue, LayerKind, Submodule
from megatron_lynx.plan import StagePlan

_log = logging.getLogger(__name__)
_NOTHING = ("IdentityOp", "IdentityFuncOp")
"""Classes of modules that stand for nothing."""


def check_layer(layer: Any) -> None:
    """Refuse a layer whose own class is not of its kind: what its forward does is not known.

    Raises:
        ConfigError: names the layer and its class.
    """
    kind = kind_of_layer(layer)
    if type(layer).__name__ != kind.layer_class:
        raise ConfigError(
            f"--recompute-method lynx: layer {layer_index(layer)} is a {type(layer).__name__}; "
            f"it supports {kind.layer_class}"
        )


def strangers(layer: Any, kind: LayerKind) -> Iterator[tuple[str, str]]:
    """Parts of ``layer`` that cannot be run again, since something unknown would run with them: the part,
    and what is unknown.

    A submodule of another class than was tested stands for itself; an unknown parent, or an unknown module
    in one, for the glue that its code is.
    """
    for name, found in unknown_parts(layer, kind).items():
        yield name, found or "nothing"
        if (inner := kind.inner().get(name)) is not None:
            yield inner, found or "nothing"
    submodules = {part.path for part in kind.parts if isinstance(part, Submodule)}
    for path, classes in kind.parents.items():
        parent = layer.get_submodule(path)
        unknown = [type(parent).__name__] if type(parent).__name__ not in classes else []
        for name, module in parent.named_children():
            kept = (*_NOTHING, *kind.within)
            if f"{path}.{name}" not in submodules and type(module).__name__ not in kept:
                unknown.append(type(module).__name__)
        for part in kind.parts:
            if isinstance(part, Glue) and part.parent == path and unknown:
                yield part.name, unknown[0]


def fixed_parts(chunks: Sequence[Any]) -> frozenset[str]:
    """Parts that no layer of the model can run again, which planners leave alone; every rank must call it."""
    own = [frozenset(name for name, _ in strangers(one, kind_of_layer(one))) for one in layers_of(chunks)]
    found = [one for rank in gathered(own) for one in rank]
    return frozenset.intersection(*found) if found else frozenset()


def plan_for(plan: StagePlan, chunks: Sequence[Any]) -> StagePlan:
    """``plan`` with every part kept that cannot be run again; says once what that is."""
    unknown: dict[int, dict[str, str]] = {}
    for layer in layers_of(chunks):
        unknown[layer_index(layer)] = dict(strangers(layer, kind_of_layer(layer)))
    layers, beyond = [], set[str]()
    for one in plan.layers:
        kept = unknown.get(one.layer, {})
        beyond |= {name for name, _ in one.choices if name in kept}
        layers.append(replace(one, choices=tuple(pair for pair in one.choices if pair[0] not in kept)))
    for name, found in sorted({pair for kept in unknown.values() for pair in kept.items()}):
        _log.warning(
            "lynx: %s is kept%s: %s runs there, which no kind of layer describes",
            name, ", beyond what is planned for memory" if name in beyond else "", found,
        )  # fmt: skip
    return replace(plan, layers=tuple(layers))
