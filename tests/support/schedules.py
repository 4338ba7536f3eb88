"""What is wrong with a schedule: an oracle for the orders of ``megatron_lynx.schedule``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lynx.schedule import Action, requires


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """What is wrong with a schedule: where, which action, why."""

    stage: int
    position: int
    action: Action
    reason: str


def violations(schedule: Sequence[Sequence[Action]], chunks: int, microbatches: int) -> tuple[Violation, ...]:
    """What keeps a schedule from running: actions missing, twice or foreign, and deadlocks."""
    stages, found = len(schedule), list[Violation]()
    due = {
        Action(kind, mb, chunk)
        for kind in ("F", "B")
        for mb in range(microbatches)
        for chunk in range(chunks)
    }
    for stage, order in enumerate(schedule):
        seen: set[Action] = set()
        for position, action in enumerate(order):
            reason = "runs twice" if action in seen else "" if action in due else "is foreign"
            seen.add(action)
            if reason:
                found.append(Violation(stage=stage, position=position, action=action, reason=reason))
        found += [
            Violation(stage=stage, position=len(order), action=action, reason="is missing")
            for action in sorted(due - seen)
        ]
    done: set[tuple[int, Action]] = set()
    at = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(schedule):
            while at[stage] < len(order) and done.issuperset(
                requires(order[at[stage]], stage, stages, chunks)
            ):
                done.add((stage, order[at[stage]]))
                at[stage] += 1
                moved = True
    for stage, order in enumerate(schedule):
        if at[stage] < len(order):
            stuck = order[at[stage]]
            lacks = [
                f"{a} of stage {s}" for s, a in requires(stuck, stage, stages, chunks) if (s, a) not in done
            ]
            reason = "waits for ever for " + " and ".join(lacks)
            found.append(Violation(stage=stage, position=at[stage], action=stuck, reason=reason))
    return tuple(found)
