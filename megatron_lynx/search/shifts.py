"""How robust an entry is: its step when a figure of the cluster is a fifth off, with the plan as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_lynx.cost import CostTable
from megatron_lynx.estimate import estimate_costs
from megatron_lynx.hardware import Cluster
from megatron_lynx.search.extend import rescaled
from megatron_lynx.search.found import Found, Shift
from megatron_lynx.search.given import score_plan
from megatron_lynx.search.space import Question


def shifted(cluster: Cluster) -> Mapping[str, Cluster]:
    """The cluster with links slower, kernels less efficient, or more contention."""
    device, slow, tight = cluster.device, dict[str, object](), dict[str, object]()
    for name in ("node", "network"):
        link = getattr(cluster, name)
        slow[name] = replace(link, bytes_per_second=link.bytes_per_second * 4 // 5)
        tight[name] = replace(link, contention=link.contention * 1.2)
    weak = replace(
        device,
        gemm_efficiency=device.gemm_efficiency * 0.8,
        attention_efficiency=device.attention_efficiency * 0.8,
        memory_efficiency=device.memory_efficiency * 0.8,
    )
    return {
        "links 20 % slower": replace(cluster, **slow),  # type: ignore[arg-type]
        "efficiency 20 % lower": replace(cluster, device=weak),
        "contention 20 % higher": replace(cluster, **tight),  # type: ignore[arg-type]
    }


def shifts_of(question: Question, entry: Found, costs: CostTable) -> tuple[Shift, ...]:
    """The entry's step on each of ``shifted``: its costs change as the estimate does."""
    parallel, batch = entry.config.parallel, question.batch(entry.config)
    usual = estimate_costs(question.model, parallel, batch, question.cluster)
    found = []
    for name, cluster in shifted(question.cluster).items():
        changed = rescaled(costs, estimate_costs(question.model, parallel, batch, cluster), usual)
        job = replace(question, cluster=cluster).job(entry.config, changed)
        found.append(Shift(name=name, iteration_ns=score_plan(job, entry.plan)))
    return tuple(found)
