"""Activation recomputation inside communication windows, for Megatron-Core.

The names below are the public API of the planning half. They are loaded when they are first used,
so that importing the package costs nothing and changes nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "Batch": "spec",
    "Cluster": "hardware",
    "ConfigError": "errors",
    "CostTable": "cost",
    "InfeasibleError": "errors",
    "Job": "job",
    "LayerCosts": "cost",
    "LayerGraph": "graph",
    "LynxError": "errors",
    "Model": "spec",
    "Parallel": "spec",
    "Plan": "plan",
    "PlanError": "errors",
    "Planned": "search.workflow",
    "Row": "search.rows",
    "compare": "search.workflow",
    "estimate_costs": "estimate",
    "layer_graph": "layers",
    "load_cluster": "presets",
    "load_model": "presets",
    "make_job": "job",
    "parse_plan": "plan",
    "plan_job": "search.workflow",
    "plan_with_costs": "search.workflow",
}

__all__ = [*_HOMES]  # sorted, and complete: a test holds both


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_lynx' has no attribute {name!r}")
    return getattr(import_module(f"megatron_lynx.{_HOMES[name]}"), name)
