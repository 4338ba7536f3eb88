"""HEU: the best plan among those with one policy for all layers of a stage.

A policy names windows relative to a layer: its own forward collectives, the stall, the head, the
backward collectives of the layer after it (``next``), those of its own backward. The first layer
in backward order has no ``next``: it does that work on demand, and with it whatever reads it in its
own windows. With identical layers memory peaks at the end of the forward pass or in the first
backward of a chunk, so a few rows hold the whole stage. Solved exactly, in milliseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import cast

from megatron_lynx.plan import Choice, StagePlan, Window
from megatron_lynx.planner.baselines import everything_on_demand, infeasible
from megatron_lynx.planner.block import Block, Slot, minus, passes_early, tidy
from megatron_lynx.planner.milp import HALF_NS_IN_US, Model, Solution
from megatron_lynx.planner.price import Pricer, fits_whole, stage_plan
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.planner.result import Answer, SolveOptions
from megatron_lynx.planner.scale import ONE_NS, ONE_UNIT, Memory, Scale, Term, scaled

MOST_S = 3.0
"""What one policy may take: hundreds of times what it usually does."""

Key = tuple[str, str]
Policy = Mapping[str, Key | str]


def heu(problem: StageProblem, options: SolveOptions) -> Answer:
    """The best policy for all layers; proven, within its family of plans."""
    if fits_whole(problem):
        return Answer(plan=stage_plan(problem, {}), status="optimal", bound_ns=0)
    stage = _PolicyModel(problem, options, budget=True)
    solution = stage.solve()
    if not solution.values:
        # The rows count what only passes on for a little too long in a last layer; prices do not.
        least = _smallest(problem, options)
        needed = Pricer(problem).price(least).peak_bytes
        if needed > problem.budget_bytes:
            raise infeasible(problem, "heu", needed)
        return Answer(plan=least, status="heuristic")
    plan = expand(problem, stage.policy(solution))
    bound = None if options.soft else max(0, math.ceil(solution.bound * 1000 - 0.5))
    return Answer(plan=plan, status="heuristic" if options.soft else solution.status, bound_ns=bound)


def _smallest(problem: StageProblem, options: SolveOptions) -> StagePlan:
    """The plan with the lowest peak that one policy for all layers can reach."""
    stage = _PolicyModel(problem, options, budget=False)
    solution = stage.solve()
    return expand(problem, stage.policy(solution)) if solution.values else everything_on_demand(problem)


def expand(problem: StageProblem, policy: Policy) -> StagePlan:
    """The stage plan of a policy."""
    choices = {}
    needed = tidy(problem, policy)
    for chunk in problem.chunks:
        for layer in chunk:
            choices[layer] = _for_layer(problem, needed, layer, last=layer == chunk[-1])
    return stage_plan(problem, choices)


def _for_layer(problem: StageProblem, policy: Policy, layer: int, *, last: bool) -> dict[str, Choice]:
    made: dict[str, Choice] = {}
    for name in problem.graph.names:
        key = policy.get(name)
        if key is None:
            continue
        if isinstance(key, str):
            made[name] = "demand"
            continue
        kind, slot = key
        if kind in ("stall", "head"):
            made[name] = Window("stall") if kind == "stall" else Window("head")
        elif kind == "fwd":
            made[name] = Window("fwd", layer, slot)
        elif kind == "next":
            made[name] = "demand" if last else Window("bwd", layer + 1, slot)
        else:
            needs = any(made.get(source) == "demand" for source in problem.graph.inputs_of(name))
            made[name] = "demand" if last and needs else Window("bwd", layer, slot)
    return made


class _PolicyModel:
    """The rows of a policy. With ``budget`` it minimises time, without it the peak."""

    def __init__(self, problem: StageProblem, options: SolveOptions, *, budget: bool) -> None:
        self.problem, self.options, self.model = problem, options, Model()
        self.scale = Scale.of(problem)
        self.count = len(problem.layers)
        slots, self.before = self._slots()
        self.phases = problem.phases
        levels = self.before + 2 * self.phases
        self.block = Block(self.model, problem, slots, levels, self.scale, soft=options.soft)
        self.memory = Memory(self.model, problem, self.scale, budget=budget)
        self.asked: dict[tuple[str, int], list[Term]] = {}
        self.again = self._again(budget)
        self._capacities(budget)
        self._memory()

    def _slots(self) -> tuple[list[Slot], int]:
        """Slots in order, and the number of levels before any backward.

        Levels: one a forward slot, stall, head, then the phases of the backward of the next layer,
        then those of the own. A window that some chunk lacks is no slot.
        """
        problem, slots = self.problem, list[Slot]()
        chunks = [i for i, chunk in enumerate(problem.chunks) if chunk]
        if all(problem.turns[i].served for i in chunks):
            for slot in problem.forward_slots:
                capacity = problem.capacity_ns(Window("fwd", 0, slot))
                slots.append(Slot(("fwd", slot), len(slots), capacity))
        if problem.stall_ns and all(problem.turns[i].waits for i in chunks):
            most = max(map(len, problem.chunks))
            slots.append(Slot(("stall", ""), len(slots), problem.stall_ns // most, idle=True))
        if problem.head_ns and len(problem.chunks) == 1:
            slots.append(Slot(("head", ""), len(slots), problem.head_ns // self.count))
        before = max(1, len(slots))
        for kind in ("next", "own"):
            for slot in problem.backward_slots:
                capacity = problem.capacity_ns(Window("bwd", 0, slot))
                own = slot.partition(".")[0] if kind == "own" else ""
                level = before + (kind == "own") * problem.phases + problem.phase_of(Window("bwd", 0, slot))
                slots.append(Slot((kind, slot), level, capacity, own=own))
        return slots, before

    def _again(self, budget: bool) -> dict[str, int]:
        """Every layer but a chunk's last pays for ``demand``; a last one for ``next`` as well, and
        for what reads that in its own windows. Returns, by region, 1 if a last layer runs it again on
        demand."""
        block, lasts = self.block, sum(bool(chunk) for chunk in self.problem.chunks)
        again: dict[str, int] = {}
        nexts, owns = block.starts[self.before], block.starts[block.own]
        for name in block.names:
            us = budget * self.problem.demand_ns(name) / 1000
            for variable, factor in block.on_demand(name):
                self.model.costs[variable] += us * factor * (self.count - lasts)
            again[name] = self.model.variable(us * lasts, integer=False)
            here = [(again[name], -1.0), (block.drop[name], 1.0)]
            own = [*block.before(name, len(block.slots)), *minus(block.before(name, owns))]
            self.model.row([*here, *minus(block.before(name, nexts)), *minus(own)], at_most=0.0)
            for source, reader in block.edges:
                if reader == name:
                    self.model.row([*own, (again[source], 1.0), (again[name], -1.0)], at_most=1.0)
        return again

    def _capacities(self, budget: bool) -> None:
        """What goes into one window of one layer: own work and that of the layer before."""
        loads: dict[Key, list[Term]] = {}
        rooms: dict[Key, int] = {}
        for j, slot in enumerate(self.block.slots):
            kind, name = cast(Key, slot.key)
            key = ("bwd", name) if kind in ("next", "own") else (kind, name)
            loads.setdefault(key, []).extend(self.block.load_us(j))
            rooms[key] = slot.capacity_ns
        for key, terms in loads.items():
            if self.options.soft:
                price = self.count * budget / self.problem.slowdown(key[0])
                excess = self.model.variable(price, upper=math.inf, integer=False)
                terms = [*terms, (excess, -1.0)]
            if terms:
                self.model.row(terms, at_most=rooms[key] / 1000 + HALF_NS_IN_US)

    def _memory(self) -> None:
        """Forward windows of the last layer, stall, head, and the first two backwards of each chunk."""
        problem = self.problem
        turns = {
            (len(chunk), problem.most_layers(i), problem.ending(i), problem.beginning(i))
            for i, chunk in enumerate(problem.chunks)
        }
        early = passes_early(problem, soft=self.options.soft)
        kept, constant = self.block.kept()
        for length, flights, ending, beginning in sorted(turns):
            if early or ending or not length:
                self._before_backward(length, flights, ending)
            for phase in range(self.phases):
                self._first_backwards(length, flights, phase)
            if beginning:
                others = flights - length
                self.memory.row(scaled(kept, others), constant * others, beginning)

    def _before_backward(self, length: int, flights: int, ending: int) -> None:
        """The points before the backward of a chunk of ``length`` layers, where ``flights`` layers of
        microbatches are alive, and at last the head with ``ending`` bytes."""
        block = self.block
        kept, constant = block.kept()
        if not length:
            self.memory.row(scaled(kept, flights), constant * flights, ending)
            return
        forwards = [j for j, s in enumerate(block.slots) if cast(Key, s.key)[0] == "fwd"]
        for level in range(self.before):
            others = max(forwards) if level in forwards else level
            terms = [*scaled(kept, flights), *block.alive(level)]
            terms += scaled(block.alive(others, done=others + (level in forwards)), length - 1)
            self.memory.row(terms, constant * flights, 0 if level in forwards else ending)
        if forwards and ending:
            end = block.alive(max(forwards), done=max(forwards) + 1)
            self.memory.row([*scaled(kept, flights), *scaled(end, length)], constant * flights, ending)

    def _first_backwards(self, length: int, flights: int, phase: int) -> None:
        """A phase of the backward of a chunk's last layer, and of the one before it."""
        block = self.block
        kept, constant = block.kept()
        here, fixed = block.kept(phase)
        following = block.alive(self.before + phase)
        carried = block.alive(self.before - 1, done=self.before)
        for gone, own in enumerate((self._last_layer_alive, self._own_alive)[:length]):
            others = length - gone - 1
            second = min(1, others)
            terms = [*scaled(kept, flights - gone - 1), *here, *own(phase)]
            terms += [*scaled(following, second), *scaled(carried, others - second)]
            self.memory.row(terms, constant * (flights - gone - 1) + fixed, self.problem.workspace(phase))

    def _own_alive(self, phase: int) -> list[Term]:
        return self.block.alive(self.block.own + phase)

    def _last_layer_alive(self, phase: int) -> list[Term]:
        """What is alive in a phase of a last layer's own backward, where the work of ``next`` is on
        demand."""
        early = self.block.starts[self.before]
        return self.block.rebuilt(
            phase,
            lambda name: self._last_layer_made(name, phase),
            lambda reader: self.block.before(reader, early),
        )

    def _last_layer_made(self, name: str, phase: int) -> list[Term]:
        """1 if a last layer has run ``name`` again by the end of ``phase``: because its backward needs
        it, in a window before any backward or in one of its own, or because a reader asks for it."""
        block = self.block
        if phase >= block.latest[name]:
            return [(block.drop[name], 1.0)]
        early = block.before(name, block.starts[self.before])
        opened = block.before(name, block.starts[block.own + phase + 1])
        own = [*opened, *minus(block.before(name, block.starts[block.own]))]
        return [*early, *own, *self._last_layer_asked(name, phase)]

    def _last_layer_asked(self, name: str, phase: int) -> list[Term]:
        """1 if a last layer runs ``name`` again on demand by the end of ``phase``."""
        if phase >= self.block.latest[name]:
            return [(self.again[name], 1.0)]
        if (name, phase) not in self.asked:
            readers = [r for source, r in self.block.edges if source == name]
            asking = [terms for r in readers if (terms := self._last_layer_asked(r, phase))]
            asked = [(self.model.variable(integer=False), 1.0)] if asking else []
            for terms in asking:
                self.model.row([(self.again[name], 1.0), *terms, *minus(asked)], at_most=1.0)
            self.asked[name, phase] = asked
        return self.asked[name, phase]

    def solve(self) -> Solution:
        deadline = time.monotonic() + min(MOST_S, self.options.time_limit_s)
        gap = ONE_NS if self.memory.peak is None else ONE_UNIT
        return self.model.solve(self.options, deadline=deadline, absolute_gap=gap, plain=True)

    def policy(self, solution: Solution) -> Policy:
        return cast(Policy, self.block.choices(solution.values))
