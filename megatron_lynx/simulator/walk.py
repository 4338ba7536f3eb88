"""From a stage's plan to its passes: what is hidden, what overruns, what is exposed.

The rules, window by window:

1. A forward pass that serves a backward pass (``schedule.serves``) rebuilds, while it waits for
   its own collectives, what the plan puts into the windows at the same place of the chunk that it
   serves. Work takes ``contention`` times as long while the collective is on the wire; what is left
   when the collective ends runs on at full speed and is exposed (``LayerCosts.overlap``).
2. Before a backward that receives a gradient, as soon as the rank is free: what the plan puts into
   the stall, and what should have been rebuilt in forward windows that did not open (there are
   none in the cooldown). It hides behind the wait for the gradient as far as that lasts.
3. In the backward, windows as in rule 1. A GEMM that Megatron itself runs beside a collective is
   slowed by the same rule, and the window is what it leaves of the collective. Whatever a region's
   backward finds missing is rebuilt on demand, with what that needs; a collective inside a rebuild
   is always exposed.
4. A dropped region that nobody needs (the end of a layer in Megatron's full recompute) is run when
   its layer's backward begins.
5. When a storage is freed, ``ledger`` says. While a phase of a layer's backward runs, its workspace is
   held.
"""

from __future__ import annotations

from megatron_lynx.cost import CostTable
from megatron_lynx.graph import LayerGraph
from megatron_lynx.plan import StagePlan, Window
from megatron_lynx.simulator import passes as kinds
from megatron_lynx.simulator.ledger import GraphIndex, Ledger
from megatron_lynx.simulator.passes import Clock, Cursor, Pass

Due = tuple[tuple[int, str], ...]
"""(layer, region) pairs to rebuild."""

_OWNER = {
    "fwd": kinds.IN_FORWARD,
    "stall": kinds.IN_STALL,
    "bwd": kinds.IN_BACKWARD,
    "head": kinds.IN_BACKWARD,
}


class StageWalk:
    """The passes of one pipeline rank under a plan.

    ``stages`` is the number of ranks; with it the walk knows which chunk holds the embedding or the
    head, and which backward receives its gradient over the pipeline link. ``workspace_bytes`` is
    held during each phase of a layer's backward, ``head_bytes`` while the output layer and the loss run,
    ``embedding_bytes`` in the backward of the embedding. ``fine`` counts memory by region instead of by
    phase; ``timed_only`` leaves pieces and memory out of the passes.
    """

    def __init__(
        self,
        plan: StagePlan,
        graph: LayerGraph | GraphIndex,
        table: CostTable,
        stages: int,
        workspace_bytes: tuple[int, ...] = (),
        head_bytes: int = 0,
        embedding_bytes: int = 0,
        fine: bool = False,
        timed_only: bool = False,
    ) -> None:
        self.plan, self.table, self.costs = plan, table, table.layer
        self.index = graph if isinstance(graph, GraphIndex) else GraphIndex(graph)
        self.workspace_bytes, self.fine = workspace_bytes, fine
        self.head_bytes, self.embedding_bytes = head_bytes, embedding_bytes
        waits = [name.removeprefix("bwd:") for name in self.costs.collective_ns if name.startswith("bwd:")]
        self._slots = {(slot.partition(".")[0], self.costs.gemm_beside(slot)): slot for slot in waits}
        self._cursor = Clock if timed_only else Cursor
        self._last_stage = plan.stage == stages - 1
        self._due = plan.windows()
        self._plans = {layer.layer: layer for layer in plan.layers}
        self._forwards: dict[tuple[int, int | None], tuple[Pass, Ledger | None]] = {}
        self._backwards: dict[tuple[int, int | None], Pass] = {}

    @property
    def chunks(self) -> int:
        """Model chunks of this rank."""
        return len(self.plan.chunks)

    def has_embedding(self, chunk: int) -> bool:
        """Whether ``chunk`` begins with the embedding."""
        return self.plan.stage == 0 and chunk == 0

    def has_head(self, chunk: int) -> bool:
        """Whether ``chunk`` ends with the output layer and the loss."""
        return self._last_stage and chunk == self.chunks - 1

    def forward(self, chunk: int, served: int | None = None) -> Pass:
        """The forward pass of ``chunk``, whose windows serve a backward of chunk ``served``."""
        return self._forward(chunk, served)[0]

    def backward(self, chunk: int, server: int | None = None) -> Pass:
        """The backward pass of ``chunk`` after a forward pass of chunk ``server`` that served it."""
        key = (chunk, server)
        if key not in self._backwards:
            self._backwards[key] = self._walk_backward(chunk, server)
        return self._backwards[key]

    # Forward

    def _ledger(self, chunk: int) -> Ledger:
        plans = {layer: self._plans[layer] for layer in self.plan.chunks[chunk]}
        return Ledger(self.index, plans, self.fine)

    def _forward(self, chunk: int, served: int | None) -> tuple[Pass, Ledger | None]:
        """The pass, and the state of what it serves when it is over."""
        key = (chunk, served)
        if key not in self._forwards:
            self._forwards[key] = self._walk_forward(chunk, served)
        return self._forwards[key]

    def _walk_forward(self, chunk: int, served: int | None) -> tuple[Pass, Ledger | None]:
        cursor, costs, table = self._cursor(), self.costs, self.table
        ledger = None if served is None else self._ledger(served)
        if self.has_embedding(chunk):
            cursor.run(kinds.FORWARD, table.embedding_forward_ns, -1, "embedding")
        for place, layer in enumerate(self.plan.chunks[chunk]):
            kept = self.index.pattern(self._plans[layer].dropped).kept_bytes
            cursor.memory(kept.get("input", 0), kinds.KEPT, layer, "input")
            for region in self.index.names:
                waits = f"fwd:{region}" in costs.collective_ns
                window = Window("fwd", layer, region)
                due = self._due_in_forward(served, place, region)
                if waits and region in costs.beside:
                    self._window(cursor, window, ledger, costs.window_ns(window), due=due)
                cursor.run(kinds.FORWARD, costs.forward_ns.get(region, 0), layer, region)
                cursor.memory(kept.get(region, 0), kinds.KEPT, layer, region)
                if waits and region not in costs.beside:
                    self._window(cursor, window, ledger, costs.window_ns(window), due=due)
        if self.has_head(chunk):
            cursor.memory(self.head_bytes, kinds.HEAD, -1, "head")
            cursor.run(kinds.FORWARD, table.head_forward_ns, -1, "head")
            cursor.memory(-self.head_bytes, kinds.HEAD, -1, "head")
        done = Pass(body=tuple(cursor.pieces), body_deltas=tuple(cursor.deltas), body_ns=cursor.now_ns)
        return done, ledger

    def _due_in_forward(self, served: int | None, place: int, region: str) -> Due:
        """What the plan puts into the window of layer number ``place`` of the served chunk."""
        layers = () if served is None else self.plan.chunks[served]
        return self._due.get(Window("fwd", layers[place], region), ()) if place < len(layers) else ()

    # Backward

    def _walk_backward(self, chunk: int, server: int | None) -> Pass:
        """Early work, the head, the layers last first, the embedding."""
        table = self.table
        ledger = self._state_before_backward(chunk, server)
        early = self._walk_early(chunk, ledger)
        cursor = self._cursor()
        if self.has_head(chunk):
            compute = table.head_backward_ns - table.head_window_ns
            cursor.memory(self.head_bytes, kinds.HEAD, -1, "head")
            cursor.run(kinds.BACKWARD, compute, -1, "head")
            self._window(cursor, Window("head"), ledger, table.head_window_ns)
            cursor.memory(-self.head_bytes, kinds.HEAD, -1, "head")
        for layer in reversed(self.plan.chunks[chunk]):
            self._walk_layer_backward(cursor, layer, ledger)
        if self.has_embedding(chunk):
            cursor.memory(self.embedding_bytes, kinds.EMBEDDING, -1, "embedding")
            cursor.run(kinds.BACKWARD, table.embedding_backward_ns, -1, "embedding")
            cursor.memory(-self.embedding_bytes, kinds.EMBEDDING, -1, "embedding")
        return Pass(
            early=tuple(early.pieces),
            early_deltas=tuple(early.deltas),
            early_ns=early.now_ns,
            body=tuple(cursor.pieces),
            body_deltas=tuple(cursor.deltas),
            body_ns=cursor.now_ns,
        )

    def _state_before_backward(self, chunk: int, server: int | None) -> Ledger:
        if server is None:
            return self._ledger(chunk)
        served = self._forward(server, chunk)[1]
        assert served is not None
        return served.copy()

    def _walk_early(self, chunk: int, ledger: Ledger) -> Cursor:
        """Rule 2: the stall's own work, and that of forward windows that did not open."""
        cursor = self._cursor()
        if self.has_head(chunk):
            return cursor
        for layer in reversed(self.plan.chunks[chunk]):
            for region, choice in self._plans[layer].choices:
                if isinstance(choice, Window) and choice.kind in ("stall", "fwd"):
                    owner = kinds.IN_STALL if choice.kind == "stall" else kinds.IN_FORWARD
                    for item in self._with_missing(ledger, layer, region):
                        self._rebuild(cursor, item, ledger, owner, kind=kinds.STALL)
        self._free(cursor, ledger.end_point(), -1, "stall")
        return cursor

    def _walk_layer_backward(self, cursor: Cursor, layer: int, ledger: Ledger) -> None:
        index, costs = self.index, self.costs
        phase = 0
        cursor.memory(self._workspace(phase), kinds.WORKSPACE, layer, "")
        for region in index.pattern(self._plans[layer].dropped).aimless:
            choice = self._plans[layer].choice(region)
            if not (isinstance(choice, Window) and choice.kind == "bwd"):
                self._demand(cursor, layer, region, ledger)
        for region in reversed(index.names):
            if region in index.graph.cuts:
                self._free(cursor, ledger.end_phase(layer, phase), layer, "")
                cursor.memory(-self._workspace(phase), kinds.WORKSPACE, layer, "")
                phase += 1
                cursor.memory(self._workspace(phase), kinds.WORKSPACE, layer, "")
            self._part(cursor, layer, region, "", ledger, 0)
            for _, producer in index.saved[region]:
                self._demand(cursor, layer, producer, ledger)
            self._part(cursor, layer, region, "dgrad", ledger, costs.dgrad_ns.get(region, 0))
            self._part(cursor, layer, region, "wgrad", ledger, costs.wgrad_ns.get(region, 0))
            self._free(cursor, ledger.backward(layer, region), layer, region)
        for region in self._plans[layer].dropped:
            if ledger.is_due(layer, region):
                self._demand(cursor, layer, region, ledger)
        self._free(cursor, ledger.end_phase(layer, len(index.graph.cuts)), layer, "")
        cursor.memory(-self._workspace(phase), kinds.WORKSPACE, layer, "")

    def _part(
        self, cursor: Cursor, layer: int, region: str, part: str, ledger: Ledger, alone_ns: int
    ) -> None:
        """A part of a region's backward and, if there is one, the collective launched before it and its
        window. The empty part is what comes first: a wait with nothing beside it."""
        slot, launched = self._slots.get((region, part)), cursor.now_ns
        if slot is None:
            cursor.run(kinds.BACKWARD, alone_ns, layer, region)
            return
        cursor.run(kinds.BACKWARD, alone_ns + self.costs.slowed_by_ns(slot), layer, region)
        window = Window("bwd", layer, slot)
        self._window(cursor, window, ledger, self.costs.window_ns(window), launched)

    def _workspace(self, phase: int) -> int:
        return self.workspace_bytes[phase] if phase < len(self.workspace_bytes) else 0

    # Windows and rebuilding

    def _window(
        self,
        cursor: Cursor,
        window: Window,
        ledger: Ledger | None,
        capacity_ns: int,
        launched_ns: int | None = None,
        due: Due | None = None,
    ) -> None:
        """Rules 1 and 3: run what is due (unless told, what the plan puts into ``window``) while the
        collective is on the wire."""
        start = cursor.now_ns if launched_ns is None else launched_ns
        end = cursor.now_ns + capacity_ns
        slot = window.slot or window.kind
        on_wire = self.costs.collective_ns.get(f"{window.kind}:{slot}", capacity_ns)
        cursor.collective(start, min(on_wire, end - start), window.layer, slot)
        if ledger is not None:
            for layer, region in self._due.get(window, ()) if due is None else due:
                for item in self._with_missing(ledger, layer, region):
                    self._rebuild(cursor, item, ledger, _OWNER[window.kind], until_ns=end)
            if window.kind != "bwd":
                self._free(cursor, ledger.end_point(), window.layer, slot)
        if cursor.now_ns < end:
            cursor.run(kinds.WAIT, end - cursor.now_ns, window.layer, slot)

    def _with_missing(self, ledger: Ledger, layer: int, region: str) -> list[tuple[int, str]]:
        """``region`` and what it lacks, in the order to run them; nothing if it is not due."""
        if not ledger.is_due(layer, region):
            return []
        return [*ledger.missing_for(layer, region), (layer, region)]

    def _demand(self, cursor: Cursor, layer: int, region: str, ledger: Ledger) -> None:
        for item in self._with_missing(ledger, layer, region):
            self._rebuild(cursor, item, ledger, kinds.ON_DEMAND)

    def _rebuild(
        self,
        cursor: Cursor,
        item: tuple[int, str],
        ledger: Ledger,
        owner: str,
        *,
        kind: str = kinds.EXPOSED,
        until_ns: int = 0,
    ) -> None:
        """Run one region again; up to ``until_ns`` it is hidden behind a collective."""
        layer, region = item
        costs, communicates = self.costs, self.index.communicates[region]
        taken, freed = ledger.rebuild(layer, region, owner)
        cursor.memory(taken, owner, layer, region)
        left = costs.rebuild_ns(region, hidden=False)
        if cursor.now_ns < until_ns and not communicates:
            hidden, left, _ = costs.overlap(left, until_ns - cursor.now_ns)
            cursor.run(kinds.HIDDEN, hidden, layer, region)
        elif communicates:
            left += costs.collective_ns.get(f"fwd:{region}", 0)
        cursor.run(kind, left, layer, region)
        self._free(cursor, freed, layer, region)

    def _free(self, cursor: Cursor, freed: list[tuple[str, int]], layer: int, region: str) -> None:
        for owner, size in freed:
            cursor.memory(-size, owner, layer, region)
