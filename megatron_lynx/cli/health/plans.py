"""What lynx is asked to do: its flags, the plan, the profile, and whether anything fits the device."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_lynx.cli.explain import read_plan
from megatron_lynx.cli.health.facts import Facts, Finding, fail, warn
from megatron_lynx.cli.job import choices_from, read_profile
from megatron_lynx.cli.megatron_flags import AT_START, HARMLESS
from megatron_lynx.cost import CostTable
from megatron_lynx.errors import InfeasibleError, LynxError
from megatron_lynx.job import Job, make_job
from megatron_lynx.layers import layer_graph
from megatron_lynx.plan import fingerprint
from megatron_lynx.search.workflow import plan_with_costs
from megatron_lynx.units import parse_bytes

_SHARE = 0.92
"""Of a device's memory, what the trainer takes where no budget is named."""

_OTHERS = ("plan", "planner", "budget", "partition", "profile", "report")


@dataclass(frozen=True, slots=True)
class Plans:
    """The checks that need the job itself: ``words`` are a launcher's, or Megatron's arguments alone."""

    words: tuple[str, ...]
    file: str | None = None

    def __call__(self, facts: Facts) -> Iterator[Finding]:
        """What is wrong with lynx's own flags and files."""
        if not facts.lynx:
            for name in _OTHERS:
                if facts.has(f"lynx-{name}"):
                    yield fail(f"--lynx-{name} needs --recompute-method lynx, which is not given")
            return
        for flag in ("plan", "profile"):
            path = facts.path(f"lynx-{flag}")
            if path is not None and not path.is_file():
                yield fail(f"--lynx-{flag} {path}: there is no such file; `lynx {flag}` writes one")
                return
        later = [flag for flag in AT_START if facts.text(flag) not in (None, *HARMLESS[flag])]
        if later:
            words = " and ".join(f"--{flag} {facts.text(flag)}" for flag in later)
            yield warn(f"{words}: the plan is not checked here; the run makes or checks it as it begins")
            return
        try:
            job = self._job(facts)
            yield from _plan(facts, job)
            yield from _fits(facts, job)
        except LynxError as error:
            yield fail(str(error))

    def _job(self, facts: Facts) -> Job:
        given = argparse.Namespace(command_line=list(self.words), from_args=None)
        if self.file is not None:
            given = argparse.Namespace(command_line=None, from_args=self.file)
        if facts.world_size is None:
            given.dp = 1  # nothing says how many ranks start; a plan is that of one replica
        job = choices_from(given, check_split=False).job
        model = replace(job.model, device="cpu") if facts.cpu else job.model
        profile = facts.path("lynx-profile")
        if profile is None:
            return replace(job, model=model) if model is not job.model and job.cluster is None else job
        return make_job(
            model,
            job.parallel,
            job.batch,
            costs=read_profile(str(profile)),
            memory_bytes=_memory(facts),
            optimizer=job.optimizer,
            layout=job.layout,
            check_split=False,
        )


def _plan(facts: Facts, job: Job) -> Iterator[Finding]:
    """The plan against the job."""
    path = facts.path("lynx-plan")
    if path is None:
        return
    if facts.has("lynx-planner"):
        yield fail("--lynx-plan and --lynx-planner exclude each other; leave one out")
    plan = read_plan(str(path))
    model = replace(job.model, device="cpu") if facts.cpu else job.model
    wanted = fingerprint(model, job.parallel, job.batch, layer_graph(model, job.parallel, job.batch))
    if len(plan.stages) != job.parallel.pp:
        yield fail(
            f"--lynx-plan {path} has {len(plan.stages)} stages; --pipeline-model-parallel-size "
            f"{len(plan.stages)} works"
        )
    elif plan.fingerprint != wanted:
        yield fail(
            f"--lynx-plan {path} was made for another job: model, parallel sizes or micro-batch differ; "
            "`lynx plan` with this job's flags makes one that fits"
        )
    elif plan.layout is not None and plan.layout != job.layout:
        yield fail(
            f"--lynx-plan {path} is for other layers by stage; --pipeline-model-parallel-layout "
            f"'{plan.layout}' works"
        )


def _memory(facts: Facts) -> int | None:
    """What training may take on a device; None where nothing says."""
    text = facts.text("lynx-budget")
    if text is not None:
        return parse_bytes(text, "--lynx-budget")
    if facts.machine.gpus:
        return int(min(gpu.total_bytes for gpu in facts.machine.gpus) * _SHARE)
    return None


def _fits(facts: Facts, job: Job) -> Iterator[Finding]:
    """Does any plan fit the device? Planned with ``heu``, by the profile or an estimate."""
    memory = _memory(facts)
    if memory is None or facts.has("lynx-plan"):
        return
    free = min((gpu.total_bytes - gpu.used_bytes for gpu in facts.machine.gpus), default=memory)
    costs: CostTable = job.costs
    try:
        plan_with_costs(
            job.model,
            job.parallel,
            job.batch,
            costs=costs,
            memory_bytes=memory,
            planner="heu",
            layout=job.layout,
            optimizer=job.optimizer,
        )
    except InfeasibleError as error:
        yield fail(f"nothing fits: {error}")
        return
    if free < memory:
        yield warn(
            "less memory is free than lynx plans for: --lynx-budget "
            f"{max(1, int(free * _SHARE) >> 30)}GiB plans for what is free"
        )
