"""Devices and networks: memory that is taken, interfaces that are not there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_lynx.cli.health.facts import Check, Facts, Finding, fail, warn
from megatron_lynx.units import format_bytes

_TAKEN = 0.03
"""Share of a device's memory that drivers and displays may hold."""


def device_memory(facts: Facts) -> Iterator[Finding]:
    """Does something lie on the devices already?"""
    if facts.cpu:
        return
    if not facts.machine.gpus and facts.machine.torch is not None:
        yield fail(
            "no GPU is here: run the doctor where the ranks will run, or MEGATRON_LYNX_CPU=1 to train on CPUs"
        )
    for number, gpu in enumerate(facts.machine.gpus[: facts.ranks_per_node or None]):
        if gpu.used_bytes > _TAKEN * gpu.total_bytes:
            yield warn(
                f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} on GPU {number} "
                "are taken by "
                "another process: nvidia-smi shows which"
            )
    if len({gpu.total_bytes for gpu in facts.machine.gpus}) > 1:
        yield warn(
            "the GPUs here differ in memory: the plan is for the smallest; --lynx-budget says otherwise"
        )


def interfaces(facts: Facts) -> Iterator[Finding]:
    """Do the interfaces exist that NCCL and gloo are told to use?"""
    there = ", ".join(facts.machine.interfaces)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.environment.get(variable)
        if not value or value.startswith("^"):
            continue
        exact = value.startswith("=") or variable.startswith("GLOO")
        names = [name for name in re.split(r"[,=]", value) if name]
        for name in names:
            if not any(one == name if exact else one.startswith(name) for one in facts.machine.interfaces):
                yield fail(f"{variable}={value}: there is no interface {name} here; there are {there}")
    backend = facts.text("distributed-backend")
    if backend == "gloo" and not facts.cpu:
        yield warn("--distributed-backend gloo on GPUs copies through the host; leave it out for NCCL")


def debugging(facts: Facts) -> Iterator[Finding]:
    """Variables that were left behind by somebody who looked for a bug."""
    for variable in ("CUDA_LAUNCH_BLOCKING", "NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"):
        if facts.environment.get(variable) == "1":
            yield warn(f"{variable}=1 makes the host wait for the device: nothing overlaps; unset it")


CHECKS: tuple[Check, ...] = (device_memory, interfaces, debugging)
