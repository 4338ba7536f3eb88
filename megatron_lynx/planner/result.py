"""What a planner is asked for and what it answers: SolveOptions, SolveReport, PlannedStage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron_lynx.graph import LayerGraph
from megatron_lynx.plan import StagePlan
from megatron_lynx.planner.problem import StageProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """How to solve, and which windows may be used.

    ``time_limit_s`` bounds one stage, ``relative_gap`` is where the solver may stop (0: to the
    nanosecond). ``threads`` and ``seed`` go to HiGHS. Each kind of window can be switched off;
    ``soft`` lets work overrun a window, and then the excess is paid on the critical path. ``start`` is
    a known plan for ``opt`` to begin from.
    """

    time_limit_s: float = 30.0
    relative_gap: float = 0.0
    threads: int = 1
    seed: int = 0
    forward: bool = True
    backward: bool = True
    stall: bool = True
    head: bool = True
    soft: bool = False
    start: StagePlan | None = None

    def restrict(self, problem: StageProblem) -> StageProblem:
        """``problem`` without the windows that are switched off."""
        return replace(
            problem,
            turns=tuple(replace(turn, served=turn.served and self.forward) for turn in problem.turns),
            backward_slots=problem.backward_slots if self.backward else (),
            stall_ns=problem.stall_ns if self.stall else 0,
            has_stall=problem.has_stall and self.stall,
            head_ns=problem.head_ns if self.head else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveReport:
    """Figures of one stage's plan, for one microbatch where they are times.

    ``status`` is ``fixed`` (a baseline without a choice), ``optimal`` (proven, within the planner's
    own family of plans), ``heuristic``, or ``limit`` (time ran out; see ``gap``). ``exposed_ns`` is
    recomputation on the critical path, ``hidden_ns`` what windows hide. ``kept_bytes`` counts all
    microbatches in flight; ``rebuilt_bytes`` is the most that is rebuilt and alive at once;
    ``peak_bytes`` the most of everything, at ``peak_point``. ``bound_ns`` is a proven lower bound
    of ``exposed_ns`` over the planner's family, None where there is none; ``gap`` is the distance
    to it as a fraction of ``exposed_ns``.
    """

    planner: str
    status: str
    exposed_ns: int
    hidden_ns: int
    kept_bytes: int
    rebuilt_bytes: int
    peak_bytes: int
    peak_point: str
    bound_ns: int | None = None
    gap: float = 0.0
    wall_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A plan of one stage that has passed ``verify``, and its report.

    ``graph`` is the graph that the figures count by: the problem's own, except for ``selective``
    (Megatron keeps the output of ``core_attention``, which the runtime's region would drop).
    ``filled`` says that its stall was filled after planning (``fill``).
    """

    plan: StagePlan
    report: SolveReport
    graph: LayerGraph
    filled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a planner hands to ``plan``, to be priced and verified.

    ``number`` is the g or k that ``full-uniform`` or ``full-block`` chose.
    """

    plan: StagePlan
    status: str
    bound_ns: int | None = None
    graph: LayerGraph | None = None
    number: int | None = field(default=None)


Planner = Callable[[StageProblem, SolveOptions], Answer]
