"""Costs of many configurations from a few: estimated from the cluster, measured, or extended.

A measured profile serves the configurations whose layer has its shape (tensor-parallel size, sequence
parallelism, microbatch). For any other shape the estimate is corrected: each region, collective and end
takes as many times its estimate as it did where it was measured nearest. A profile was taken inside a
node; what crosses nodes (transfers between stages, gradients) is always the cluster file's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError
from megatron_lynx.estimate import estimate_costs
from megatron_lynx.layers import layer_graph
from megatron_lynx.search.space import Config, Question

_LAYER = ("forward_ns", "dgrad_ns", "wgrad_ns", "collective_ns")
_ENDS = (
    *("embedding_forward_ns", "embedding_backward_ns"),
    *("head_forward_ns", "head_backward_ns", "head_window_ns"),
)

Shape = tuple[int, bool, int, bool]
"""What a layer's costs depend on: TP, sequence parallelism, microbatch, and whether there is a pipeline."""


def shape_of(config: Config) -> Shape:
    """The shape of a configuration's layer."""
    return config.tp, config.sequence_parallel, config.micro_batch_size, config.pp > 1


@dataclass(frozen=True, slots=True)
class _Measured:
    shape: Shape
    table: CostTable
    estimate: CostTable


class Costs:
    """The costs of a question's configurations, each shape's made once."""

    def __init__(self, question: Question, configs: Sequence[Config] = ()) -> None:
        self.question = question
        self._estimates: dict[Shape, CostTable] = {}
        self._tables: dict[Shape, tuple[CostTable, str]] = {}
        self._measured: list[_Measured] = []
        if question.profiles:
            self._place(configs)

    def _place(self, configs: Sequence[Config]) -> None:
        """Find the shape that each profile was measured for.

        Raises:
            ConfigError: none of the configurations has its shape.
        """
        question, shapes = self.question, {shape_of(config): config for config in configs}
        prints = {
            layer_graph(question.model, config.parallel, question.batch(config)).fingerprint(): shape
            for shape, config in shapes.items()
        }
        for table in question.profiles:
            if table.graph not in prints:
                raise ConfigError(
                    f"--profile: the costs ({table.source}) were measured for a layer shape ({table.graph}) "
                    "that no configuration of these devices has; `lynx profile` with this model works"
                )
            shape = prints[table.graph]
            self._measured.append(_Measured(shape, table, self._estimate(shape, shapes[shape])))

    def _estimate(self, shape: Shape, config: Config) -> CostTable:
        if shape not in self._estimates:
            question = self.question
            self._estimates[shape] = estimate_costs(
                question.model, config.parallel, question.batch(config), question.cluster
            )
        return self._estimates[shape]

    def of(self, config: Config) -> tuple[CostTable, str]:
        """The costs of a configuration, and ``estimated``, ``measured`` or ``extended``."""
        shape = shape_of(config)
        if shape not in self._tables:
            table, source = self._make(shape, self._estimate(shape, config))
            self._tables[shape] = replace(table, graph=""), source  # its shape is known to fit
        return self._tables[shape]

    def _make(self, shape: Shape, estimate: CostTable) -> tuple[CostTable, str]:
        if not self._measured:
            return estimate, "estimated"
        near = min(self._measured, key=lambda one: _distance(one.shape, shape))
        if near.shape[:3] != shape[:3]:
            table = rescaled(estimate, near.table, near.estimate)
            return replace(table, source=f"extended from {near.table.source}"), "extended"
        inside = self.question.devices <= self.question.cluster.gpus_per_node
        p2p = near.table.p2p_ns if inside and near.shape == shape else estimate.p2p_ns
        return replace(near.table, p2p_ns=p2p), "measured"


def _distance(one: Shape, other: Shape) -> tuple[bool, float]:
    return one[1] != other[1], abs(math.log(one[0] / other[0])) + abs(math.log(one[2] / other[2]))


def rescaled(table: CostTable, measured: CostTable, estimate: CostTable) -> CostTable:
    """``table`` with each time as many times as long as ``measured`` is of ``estimate``."""
    parts: Any = {
        name: _scaled(*(getattr(one.layer, name) for one in (table, measured, estimate))) for name in _LAYER
    }
    contention = table.layer.contention * measured.layer.contention / estimate.layer.contention
    layer = replace(table.layer, contention=max(1.0, contention), **parts)
    ends = [{name: getattr(one, name) for name in _ENDS} for one in (table, measured, estimate)]
    return replace(table, layer=layer).with_times(_scaled(*ends))


def _scaled(
    times: Mapping[str, int], measured: Mapping[str, int], estimated: Mapping[str, int]
) -> dict[str, int]:
    """Each time by its own ratio of measured to estimated; what was not measured by that of the sums."""
    known = [name for name in estimated if estimated[name] and name in measured]
    whole = sum(estimated[name] for name in known)
    mean = sum(measured[name] for name in known) / whole if whole else 1.0
    return {
        name: round(time * (measured[name] / estimated[name] if name in known else mean))
        for name, time in times.items()
    }
