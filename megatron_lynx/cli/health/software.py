"""What is installed, and what it lacks for the job."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.cli.health.facts import Check, Facts, Finding, fail, warn
from megatron_lynx.integration.versions import NEWEST, OLDEST, TESTED, tested_versions

_OLDEST_TORCH = (2, 6)
_VPP_SINCE = (0, 18)
_OTHER_MODELS = ("bert", "t5", "vlm", "hybrid", "mamba")


def python_and_torch(facts: Facts) -> Iterator[Finding]:
    """Is there a Python and a torch that Megatron runs on?"""
    machine = facts.machine
    if machine.python < (3, 12):
        yield fail(f"Python {machine.python[0]}.{machine.python[1]}: megatron-core 0.17 and newer need 3.12")
    if machine.torch is None:
        yield fail(
            "torch is not installed here: run the doctor where the ranks will run, or pip install torch"
        )
    elif _release(machine.torch) < _OLDEST_TORCH:
        yield fail(f"torch {machine.torch} is older than what works; {tested_versions()}")


def megatron(facts: Facts) -> Iterator[Finding]:
    """Is there a Megatron that lynx knows?"""
    machine = facts.machine
    if machine.megatron_error:
        yield fail(machine.megatron_error)
    elif machine.megatron is None:
        yield fail(
            "megatron-core is not installed here: pip install megatron-core, or "
            "PYTHONPATH=PATH/TO/Megatron-LM"
        )
    elif _release(machine.megatron) < OLDEST:
        yield fail(
            f"megatron-core {machine.megatron} in {machine.megatron_place} is older than what "
            f"works; {tested_versions()}"
        )
    elif not machine.megatron_trainer:
        yield fail(
            f"megatron-core {machine.megatron} in {machine.megatron_place} has no trainer "
            "(megatron.training): "
            "PYTHONPATH=PATH/TO/Megatron-LM works"
        )
    elif _release(machine.megatron) > NEWEST or (facts.lynx and machine.megatron not in TESTED):
        yield warn(f"megatron-core {machine.megatron} was not tested; {tested_versions()}")
    virtual = facts.has("num-layers-per-virtual-pipeline-stage") or facts.has(
        "num-virtual-stages-per-pipeline-rank"
    )
    if machine.megatron is not None and virtual and _release(machine.megatron) < _VPP_SINCE:
        yield warn(
            f"megatron-core {machine.megatron}: interleaved stages are not deterministic in stock "
            "before 0.18; "
            "losses of two runs differ"
        )


def transformer_engine(facts: Facts) -> Iterator[Finding]:
    """Are there the layers that the job asks for, and the optimizer?"""
    machine = facts.machine
    if machine.transformer_engine is not None and not machine.transformer_engine_torch:
        yield fail(
            f"transformer-engine {machine.transformer_engine} has no half for torch, and importing "
            "Megatron trips "
            "over it: pip install 'transformer-engine[pytorch]', or pip uninstall transformer-engine"
        )
    elif machine.transformer_engine is None and facts.transformer_engine:
        yield fail(
            "--transformer-impl transformer_engine (Megatron's default) needs Transformer Engine, "
            "which is not "
            "installed: pip install 'transformer-engine[pytorch]', or --transformer-impl local"
        )
    without = not machine.transformer_engine_torch and not machine.apex
    if without and not facts.has("no-persist-layer-norm") and not facts.transformer_engine:
        yield fail(
            "the persistent layer norm is a kernel of Apex, which is not installed: --no-persist-layer-norm"
        )
    if without and not facts.has("no-gradient-accumulation-fusion") and not facts.transformer_engine:
        yield fail(
            "fused gradient accumulation is a kernel of Apex or Transformer Engine, neither is installed: "
            "--no-gradient-accumulation-fusion"
        )
    if facts.has("save") and not machine.psutil:
        yield fail(
            "--save: Megatron's checkpoint writer needs psutil, which is not installed: pip install psutil"
        )


def model(facts: Facts) -> Iterator[Finding]:
    """Does the script build what lynx trains?"""
    if facts.lynx and facts.script in [f"pretrain_{name}.py" for name in _OTHER_MODELS]:
        yield fail(
            f"--recompute-method lynx trains GPTModel, and {facts.script} builds another model: "
            "--recompute-granularity selective works there"
        )


def cpu_backend(facts: Facts) -> Iterator[Finding]:
    """Training on CPUs: asked for where it can be, with the flags it needs."""
    if not facts.cpu:
        return
    if facts.machine.gpus:
        yield fail(
            "MEGATRON_LYNX_CPU=1 where there are GPUs: unset it, or set CUDA_VISIBLE_DEVICES to nothing"
        )
    needs = ("no-persist-layer-norm", "no-gradient-accumulation-fusion", "no-masked-softmax-fusion")
    missing = [f"--{name}" for name in needs if not facts.has(name)]
    missing += [] if facts.text("distributed-backend") == "gloo" else ["--distributed-backend gloo"]
    missing += [] if not facts.transformer_engine else ["--transformer-impl local"]
    if missing:
        yield fail(f"training on CPU needs these flags too: {' '.join(missing)}")


def _release(version: str) -> tuple[int, int]:
    major, minor = [*version.split("+")[0].split("."), "0"][:2]
    return int(major), int(minor)


CHECKS: tuple[Check, ...] = (python_and_torch, megatron, transformer_engine, model, cpu_backend)
