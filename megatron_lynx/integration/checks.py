"""Refuses layers that hold something which no kind of layer describes, before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lynx.errors import ConfigError
from megatron_lynx.integration.binding import kind_of_layer, layer_index
from megatron_lynx.layers.kind import LayerKind, Submodule

_NOTHING = ("IdentityOp", "IdentityFuncOp")
"""Classes of modules that stand for nothing."""


def check_layer(layer: Any) -> None:
    """Refuse a layer whose class, or one of whose modules, is not of its kind.

    Raises:
        ConfigError: names the layer, the module and its class.
    """
    kind = kind_of_layer(layer)
    where = f"--recompute-method lynx: layer {layer_index(layer)}"
    if type(layer).__name__ != kind.layer_class:
        raise ConfigError(f"{where} is a {type(layer).__name__}; it supports {kind.layer_class}")
    for path, found, known in _strangers(layer, kind):
        has = f"a {found}" if found else "nothing"
        works = f"{' or '.join(known)} works" if known else "a layer without it works"
        raise ConfigError(f"{where} has {has} at {path}, which no kind of layer describes; {works}")


def _strangers(layer: Any, kind: LayerKind) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Modules of ``layer`` that are not of ``kind``: path, class (empty if it is missing), and the classes
    that were tested there."""
    known = {part.path: part.classes for part in kind.parts if isinstance(part, Submodule)}
    known |= dict(kind.parents)
    modules = dict(layer.named_modules())
    for path, classes in known.items():
        found = type(modules[path]).__name__ if path in modules else ""
        if found not in classes:
            yield path, found, classes
    for path, module in modules.items():
        above = path.rpartition(".")[0]
        ours = above == "" or above in kind.parents
        if path and ours and path not in known and type(module).__name__ not in _NOTHING:
            yield path, type(module).__name__, ()
