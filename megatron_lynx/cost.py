"""What running costs: nanoseconds per region, per collective and per transfer.

``LayerCosts`` holds the times of one layer, ``CostTable`` those of a whole job. Both are data:
either estimated from a device's rates (``estimate_costs``) or measured by the profiler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from statistics import median
from typing import Any

from megatron_lynx.errors import ConfigError
from megatron_lynx.plan import Window
from megatron_lynx.spec import Facts

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Times of one layer for one microbatch on one rank.

    ``forward_ns`` is the compute of each region alone. A region's backward is ``dgrad_ns`` (all
    that is not a weight gradient) plus ``wgrad_ns`` (the weight-gradient GEMM of a linear).
    ``collective_ns`` has one entry per wait: ``fwd:SLOT`` and ``bwd:SLOT``, with the slots of the
    layer's kind (``LayerKind``). ``beside`` names the linears that are split by column: their
    collective comes before the GEMM in the forward and after it in the backward; it is the other way
    round for those split by row. ``contention`` multiplies the time of work that runs while a
    collective is on the wire (``overlap``), Megatron's own GEMMs included.
    """

    forward_ns: Mapping[str, int]
    dgrad_ns: Mapping[str, int]
    wgrad_ns: Mapping[str, int]
    collective_ns: Mapping[str, int] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    contention: float = 1.0

    def backward_ns(self, region: str) -> int:
        """Compute of a region's backward."""
        return self.dgrad_ns.get(region, 0) + self.wgrad_ns.get(region, 0)

    def rebuild_ns(self, region: str, *, hidden: bool) -> int:
        """Compute to run ``region`` again, longer by ``contention`` when it shares the device
        with a collective (``hidden``)."""
        base = self.forward_ns.get(region, 0)
        return round(base * self.contention) if hidden else base

    def at_pace(self, forward: float, backward: float) -> LayerCosts:
        """The same layer where forward and backward compute take so many times as long; collectives stay."""
        paces = (("forward_ns", forward), ("dgrad_ns", backward), ("wgrad_ns", backward))
        compute: Any = {n: {r: round(t * pace) for r, t in getattr(self, n).items()} for n, pace in paces}
        return replace(self, **compute)

    def overlap(self, work_ns: int, wire_ns: int) -> tuple[int, int, int]:
        """Work g and a collective w that start together: the work's time while the collective is on
        the wire, its time after that, and what it leaves of the collective.

        With contention c: if c g <= w, the work takes c g and leaves w - c g. Else w/c of it is done on
        the wire and the rest at full speed (rounded up): it takes g + w (1 - 1/c) and leaves nothing.
        """
        slowed = round(work_ns * self.contention)
        beside = min(slowed, wire_ns)
        return beside, min(work_ns, ceil((slowed - beside) / self.contention)), wire_ns - beside

    def gemm_beside(self, slot: str) -> str:
        """What Megatron runs beside the collective of a ``bwd`` slot: the region's ``dgrad`` beside the
        gather of its saved input, its ``wgrad`` beside the reduction of that input's gradient, or
        nothing."""
        region, _, part = slot.partition(".")
        return "dgrad" if part == "gather" else "wgrad" if part or region in self.beside else ""

    def _beside(self, slot: str) -> tuple[int, int]:
        """The GEMM beside the collective of a ``bwd`` slot and the collective, each alone."""
        gemms = {"dgrad": self.dgrad_ns, "wgrad": self.wgrad_ns}.get(self.gemm_beside(slot), {})
        return gemms.get(slot.partition(".")[0], 0), self.collective_ns.get(f"bwd:{slot}", 0)

    def slowed_by_ns(self, slot: str) -> int:
        """How much longer the GEMM takes beside the collective of a ``bwd`` slot than alone:
        min(c g, g + w (1 - 1/c)) - g."""
        gemm, wire = self._beside(slot)
        return sum(self.overlap(gemm, wire)[:2]) - gemm

    def window_ns(self, window: Window) -> int:
        """How long the compute stream would wait in a ``fwd`` or ``bwd`` window: max(0, w - c g), where
        g is what Megatron itself runs during the collective (``gemm_beside``)."""
        if window.kind == "fwd":
            return self.collective_ns.get(f"fwd:{window.slot}", 0)
        return self.overlap(*self._beside(window.slot))[2]

    @property
    def layer_forward_ns(self) -> int:
        """A layer's forward: compute and every collective, none of it overlapped."""
        waits = sum(t for name, t in self.collective_ns.items() if name.startswith("fwd:"))
        return sum(self.forward_ns.values()) + waits

    @property
    def layer_backward_ns(self) -> int:
        """A layer's backward without recomputation: a collective and the GEMM beside it take
        max(w, g + w (1 - 1/c)), all else its time."""
        compute = sum(self.dgrad_ns.values()) + sum(self.wgrad_ns.values())
        slots = [name.removeprefix("bwd:") for name in self.collective_ns if name.startswith("bwd:")]
        return compute + sum(self.slowed_by_ns(s) + self.window_ns(Window("bwd", 0, s)) for s in slots)


_TABLE_TIMES = (
    "p2p_ns",
    "embedding_forward_ns",
    "embedding_backward_ns",
    "head_forward_ns",
    "head_backward_ns",
    "head_window_ns",
)
_LAYER_TIMES = ("forward_ns", "dgrad_ns", "wgrad_ns", "collective_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Times of a whole job, for one microbatch on one rank.

    ``workspace_bytes`` is what each phase of a layer's backward was measured to need besides saved
    storages (``LayerGraph.cuts``); empty where it was not measured, and then it is estimated.
    ``kept_bytes`` is, by region, what one layer keeps for a microbatch where that was found to differ from
    what its kind describes. ``p2p_ns`` is one transfer of activations between neighbouring stages. The
    embedding is the work of the first stage besides its layers, the head that of the last: final norm,
    output layer, loss, collectives included. ``head_window_ns`` is how long the last stage then waits for
    the output layer's input gradient, which ``head_backward_ns`` contains. ``graph`` is the fingerprint of
    the layer's graph as it is described and ``job`` what it belongs to in words (``spec.layer_facts``), so
    that a table is not used for another shape; ``source`` says where the times come from.
    """

    layer: LayerCosts
    p2p_ns: int = 0
    embedding_forward_ns: int = 0
    embedding_backward_ns: int = 0
    head_forward_ns: int = 0
    head_backward_ns: int = 0
    head_window_ns: int = 0
    workspace_bytes: tuple[int, ...] = ()
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    graph: str = ""
    job: Facts = field(default_factory=dict)
    source: str = "custom"

    def with_times(self, times: Mapping[str, int]) -> CostTable:
        """The table with some of the times outside of the layers replaced; ``KeyError`` for a name that
        is none of them."""
        changed = {name: times.get(name, getattr(self, name)) for name in _TABLE_TIMES}
        if unknown := times.keys() - changed.keys():
            raise KeyError(f"{sorted(unknown)} are no times of a table")
        made: Any = changed
        return replace(self, **made)

    @staticmethod
    def median(tables: Sequence[CostTable]) -> CostTable:
        """Time by time the median of tables of one job; what is not a time is the first one's."""

        def middle(name: str) -> dict[str, int]:
            every = [getattr(table.layer, name) for table in tables]
            return {key: round(median(times[key] for times in every)) for key in every[0]}

        parts: Any = {name: middle(name) for name in _LAYER_TIMES}
        contention = median(table.layer.contention for table in tables)
        times = {name: round(median(getattr(table, name) for table in tables)) for name in _TABLE_TIMES}
        layer = replace(tables[0].layer, contention=contention, **parts)
        return replace(tables[0], layer=layer).with_times(times)

    def to_json(self) -> str:
        """The JSON form, with a schema version; what ``--profile FILE`` reads."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "--profile") -> CostTable:
        """Read the JSON form; ``where`` names the file in errors.

        Raises:
            ConfigError: not JSON, another schema, or a field missing or malformed.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ConfigError(f"{where}: schema {data['schema']} is unknown; {SCHEMA} works")
            layer = data["layer"]
            times = {name: _whole(layer[name], f"layer.{name}") for name in _LAYER_TIMES}
            contention = float(layer.get("contention", 1.0))
            if contention < 1.0:
                raise ValueError(f"layer.contention {contention} is below 1")
            beside = tuple(str(name) for name in layer["beside"])
            whole = _whole({name: data[name] for name in _TABLE_TIMES}, "table")
            workspaces = tuple(data.get("workspace_bytes", ()))
            if not all(type(size) is int and size >= 0 for size in workspaces):
                raise ValueError(f"workspace_bytes {workspaces!r} are not whole numbers of bytes")
            return cls(
                layer=LayerCosts(**times, beside=beside, contention=contention),
                **whole,
                workspace_bytes=workspaces,
                kept_bytes=_whole(data.get("kept_bytes", {}), "kept_bytes", "bytes"),
                graph=str(data["graph"]),
                job=dict(data.get("job", {})),
                source=str(data["source"]),
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{where} is not a table of costs ({error!r}); `lynx profile` writes one"
            ) from error


def _whole(table: Mapping[str, Any], where: str, unit: str = "nanoseconds") -> dict[str, int]:
    """``table`` itself, if each of its values is a whole number of ``unit``."""
    for name, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{where}: {name} {value!r} is not a whole number of {unit}")
    return dict(table)
