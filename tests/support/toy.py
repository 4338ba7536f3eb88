"""Small problems with round numbers, for tests."""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.cost import LayerCosts
from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.planner.problem import StageProblem
from megatron_lynx.schedule import Turn


def toy_graph() -> LayerGraph:
    """Five regions: a norm, a GEMM that saves nothing of its own, attention, a collective, a norm.

    Bytes and readers are chosen so that every rule shows: ``gemm.out`` only passes on, ``proj``
    communicates, ``mask`` reads nothing.
    """
    return LayerGraph(
        regions=(
            Region(name=INPUT),
            Region(name="norm", reads=("input",)),
            Region(name="gemm", reads=("norm.out",)),
            Region(name="attn", reads=("gemm.out",)),
            Region(name="proj", reads=("attn.out",), communicates=True),
            Region(name="mask", draws=True),
            Region(name="add", reads=("input", "proj.out")),
            Region(name="mlp", reads=("add.out",), communicates=True),
        ),
        storages=(
            Storage(name="input", producer=INPUT, size_bytes=10, saved_by=("norm",)),
            Storage(name="norm.out", producer="norm", size_bytes=10, saved_by=("gemm",)),
            Storage(name="gemm.out", producer="gemm", size_bytes=30),
            Storage(name="attn.in", producer="attn", size_bytes=40, saved_by=("attn",)),
            Storage(name="attn.out", producer="attn", size_bytes=10, saved_by=("proj",)),
            Storage(name="proj.out", producer="proj", size_bytes=10),
            Storage(name="mask.out", producer="mask", size_bytes=5, saved_by=("add",)),
            Storage(name="add.out", producer="add", size_bytes=10, saved_by=("mlp",)),
        ),
    )


def toy_costs(collective_ns: int = 30) -> LayerCosts:
    """Times of ``toy_graph``: a norm, a mask and an addition fit a window, a GEMM does not."""
    forward = {"norm": 10, "gemm": 50, "attn": 25, "proj": 40, "mask": 5, "add": 10, "mlp": 100}
    slots = ("fwd:proj", "fwd:mlp", "bwd:mlp", "bwd:gemm")
    return LayerCosts(
        forward_ns=forward,
        dgrad_ns=forward,
        wgrad_ns={},
        collective_ns=dict.fromkeys(slots, collective_ns),
    )


def toy_problem(
    *, layers: int = 2, in_flight: int = 3, budget_bytes: int = 10**6, collective_ns: int = 30
) -> StageProblem:
    """A stage of ``layers`` toy layers, windows and all, without stall and head."""
    return StageProblem(
        stage=0,
        chunks=(tuple(range(layers)),),
        graph=toy_graph(),
        costs=toy_costs(collective_ns),
        turns=(Turn(moments=((in_flight,),)),),
        budget_bytes=budget_bytes,
        forward_slots=("proj", "mlp"),
        backward_slots=("mlp", "gemm"),
        workspace_bytes=(20,),
    )


def with_budget(problem: StageProblem, budget_bytes: int) -> StageProblem:
    """``problem`` with another budget."""
    return replace(problem, budget_bytes=budget_bytes)
