"""Kinds of layers: everything that is known about one, in one module each.

A module of this package that has a ``KIND`` adds a kind; the others hold what kinds share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules

from megatron_lynx.errors import ConfigError
from megatron_lynx.graph import LayerGraph
from megatron_lynx.layers.kind import LayerKind
from megatron_lynx.spec import Batch, Model, Parallel


def found_kinds() -> dict[str, LayerKind]:
    """The kinds in the modules of this package, by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    kinds: list[LayerKind] = [module.KIND for module in modules if hasattr(module, "KIND")]
    return {kind.name: kind for kind in kinds}


KINDS: Mapping[str, LayerKind] = found_kinds()
"""Every kind by its name."""


def kind_of(model: Model) -> LayerKind:
    """The kind of layer that ``model`` is made of.

    Raises:
        ConfigError: ``--transformer-impl`` names none that is known.
    """
    if model.transformer_impl not in KINDS:
        raise ConfigError(
            f"--transformer-impl {model.transformer_impl} is not known; {' or '.join(sorted(KINDS))} works"
        )
    return KINDS[model.transformer_impl].having(model)


def layer_graph(model: Model, parallel: Parallel, batch: Batch) -> LayerGraph:
    """Regions and storages of one layer on one tensor-parallel rank, for one microbatch."""
    own = replace(parallel, pp=1, vpp=1, dp=1, microbatch_group_size=None)
    return _graph(model, own, replace(batch, global_batch_size=batch.micro_batch_size))


@lru_cache(maxsize=256)
def _graph(model: Model, parallel: Parallel, batch: Batch) -> LayerGraph:
    return kind_of(model).graph(model, parallel, batch)
