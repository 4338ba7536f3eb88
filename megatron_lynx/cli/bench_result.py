"""What a bench found, as data: medians with their spread, predictions beside them, the Pareto front.

``cases_from`` turns what the ranks wrote into ``Case`` values; everything else reads those.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lynx.cli.bench_predict import Predictor
from megatron_lynx.errors import ConfigError

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One method in one case.

    Steps are whole: schedule and optimizer, the slowest rank's. ``low_ns`` and ``high_ns`` are the
    quartiles. ``kind`` is ``stock`` (Megatron's own), ``lynx`` or ``demand`` (a lynx plan with its
    windows off). ``target_bytes`` is the budget that the plan was made for; ``peak_bytes`` what the
    meter saw. Rebuilt storages are counted over all ranks. Predictions are None where the method has
    no plan that says the same.
    """

    name: str
    kind: str
    steps: int
    step_ns: int
    low_ns: int
    high_ns: int
    peak_bytes: int
    target_bytes: int | None
    predicted_step_ns: int | None
    predicted_peak_bytes: int | None
    planned_hidden_ns: int | None
    planned_exposed_ns: int | None
    rebuilt_in_windows: int
    rebuilt_in_stalls: int
    rebuilt_on_demand: int

    @property
    def step_error(self) -> float | None:
        """Predicted over measured step time, less 1."""
        return None if self.predicted_step_ns is None else self.predicted_step_ns / self.step_ns - 1

    @property
    def peak_error(self) -> float | None:
        """Predicted over measured peak, less 1."""
        return None if self.predicted_peak_bytes is None else self.predicted_peak_bytes / self.peak_bytes - 1

    def beats(self, other: Measured) -> bool:
        """Whether it is no larger and no slower, and better in one of the two."""
        own, its = (self.step_ns, self.peak_bytes), (other.step_ns, other.peak_bytes)
        return own != its and all(a <= b for a, b in zip(own, its, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All methods of one job over one link. ``costs`` is the measured cost table, as JSON values."""

    name: str
    link: str
    parallel: Mapping[str, Any]
    model: Mapping[str, Any]
    batch: Mapping[str, Any]
    rounds: int
    outside_ns: int
    costs: Mapping[str, Any]
    rows: tuple[Measured, ...]

    def row(self, name: str) -> Measured | None:
        """The row of one method; None if it was not measured."""
        return next((row for row in self.rows if row.name == name), None)

    def hidden_share(self, row: Measured) -> float | None:
        """How much of a lynx plan's recomputation its windows hid, by the clock: what they saved, as
        a share of what recomputation costs with the windows off."""
        none, off = self.row("none"), self.row(f"{row.name}, windows off")
        if none is None or off is None or off.step_ns <= none.step_ns:
            return None
        return (off.step_ns - row.step_ns) / (off.step_ns - none.step_ns)


def front(rows: Iterable[Measured]) -> tuple[Measured, ...]:
    """The Pareto front: rows that no other beats, smallest peak first."""
    listed = list(rows)
    kept = [row for row in listed if not any(other.beats(row) for other in listed)]
    return tuple(sorted(kept, key=lambda row: (row.peak_bytes, row.step_ns)))


def best_stock(case: Case, row: Measured) -> Measured | None:
    """Megatron's fastest method that needs no more memory than ``row``."""
    smaller = [r for r in case.rows if r.kind == "stock" and r.peak_bytes <= row.peak_bytes]
    return min(smaller, key=lambda r: r.step_ns, default=None)


# --- from what the ranks wrote -------------------------------------------------------------------


def case_from(name: str, link: str, result: Mapping[str, Any]) -> Case:
    """One case from the JSON object that rank 0 wrote."""
    predictor = Predictor(result)
    return Case(
        name=name,
        link=link,
        parallel=result["job"]["parallel"],
        model=result["job"]["model"],
        batch=result["job"]["batch"],
        rounds=result["rounds"],
        outside_ns=result["outside_ns"],
        costs=result["costs"],
        rows=tuple(_measured(row, predictor) for row in result["rows"]),
    )


def _measured(row: Mapping[str, Any], predictor: Predictor) -> Measured:
    predicted = predictor.predict(row["plan"]) if row["plan"] else None
    low, middle, high = quartiles(row["step_ns"])
    counts: Mapping[str, int] = row["rebuilt_storages"]
    return Measured(
        name=row["name"],
        kind=row["kind"],
        steps=len(row["step_ns"]),
        step_ns=middle,
        low_ns=low,
        high_ns=high,
        peak_bytes=row["peak_bytes"],
        target_bytes=row["target_bytes"],
        rebuilt_in_windows=sum(counts.get(kind, 0) for kind in ("fwd", "bwd", "head")),
        rebuilt_in_stalls=counts.get("stall", 0),
        rebuilt_on_demand=counts.get("demand", 0),
        predicted_step_ns=None if predicted is None else predicted.step_ns,
        predicted_peak_bytes=None if predicted is None else predicted.peak_bytes,
        planned_hidden_ns=None if predicted is None else predicted.hidden_ns,
        planned_exposed_ns=None if predicted is None else predicted.exposed_ns,
    )


def quartiles(times: Sequence[int]) -> tuple[int, int, int]:
    """First quartile, median and third quartile, in whole nanoseconds."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return round(low), round(middle), round(high)


# --- JSON ----------------------------------------------------------------------------------------


def to_json(machine: Mapping[str, Any], cases: Sequence[Case]) -> str:
    """The file that ``lynx bench --json`` writes."""
    whole = {"schema": SCHEMA, "machine": dict(machine), "cases": [asdict(case) for case in cases]}
    return json.dumps(whole, indent=1) + "\n"


def from_json(text: str, where: str) -> tuple[dict[str, Any], tuple[Case, ...]]:
    """The inverse of ``to_json``: the machine and the cases.

    Raises:
        ConfigError: not such a file.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ConfigError(f"{where}: schema {data['schema']} is unknown; {SCHEMA} works")
        cases = []
        for case in data["cases"]:
            rows = tuple(Measured(**row) for row in case.pop("rows"))
            cases.append(Case(**case, rows=rows))
        return data["machine"], tuple(cases)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{where} is not a bench ({error!r}); `lynx bench --json` writes one") from error
