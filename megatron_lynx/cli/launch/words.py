"""The words of a launch: which belong to the launcher, which to the training script, how many ranks start."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from megatron_lynx.cli.launch.capturing import Launch
from megatron_lynx.cli.launch.stand_in import (
    JOB,
    PREFIXES,
    RECORDED,
    UNKNOWN,
    WRAPPERS,
    inner_command,
    name_of,
    slurm_environment,
    slurm_options,
)
from megatron_lynx.errors import ConfigError

_DISTRIBUTED = ("torch.distributed.run", "torch.distributed.launch")


def launch_of(words: Sequence[str], environment: dict[str, str]) -> Launch:
    """The launch that a command line written after ``--`` is; nothing is run.

    Raises:
        ConfigError: there is no command.
    """
    launch = Launch(argv=tuple(words), environment=environment)
    while launch.argv:
        first = launch.argv[0]
        name, rest = name_of(first), launch.argv[1:]
        if "=" in first and not first.startswith("-") and first.split("=")[0].isidentifier():
            key, _, value = first.partition("=")
            launch = replace(launch, argv=rest, environment={**launch.environment, key: value})
        elif name in ("bash", "sh") and rest[:1] and rest[0] in ("-c", "-lc") and len(rest) > 1:
            launch = replace(launch, argv=tuple(shlex.split(rest[1])))
        elif name in (*WRAPPERS, *PREFIXES, "env"):
            inner = inner_command(rest)
            if not inner:
                break
            outer = launch.argv[: len(launch.argv) - len(inner)]
            added = slurm_environment(slurm_options(outer)) if name == "srun" else {}
            within = (*launch.within, outer) if name in WRAPPERS else launch.within
            environment = {**launch.environment, **(JOB if added else {}), **added}
            launch = replace(launch, argv=tuple(inner), within=within, environment=environment)
        else:
            break
    if not launch.argv:
        raise ConfigError("-- is followed by no command; `-- torchrun ... pretrain_gpt.py ...` works")
    return launch


def split(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The launcher's words, training script included, and the script's own.

    A bare list of arguments is the script's own.
    """
    if argv and argv[0].startswith("--"):
        return (), tuple(argv)
    for i, word in enumerate(argv):
        module = word == "-m" and argv[i + 1 : i + 2] and argv[i + 1] not in _DISTRIBUTED
        if module:
            return tuple(argv[: i + 2]), tuple(argv[i + 2 :])
        if word.endswith(".py"):
            return tuple(argv[: i + 1]), tuple(argv[i + 1 :])
    return tuple(argv), ()


def _option(words: Sequence[str], *names: str) -> str | None:
    """The value of the last of the options; empty where it has none."""
    found = None
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            following = words[i + 1] if i + 1 < len(words) else ""
            found = (
                value
                if equals
                else ""
                if following.startswith("-") or following.endswith(".py")
                else following
            )
    return found


def _count(text: str) -> int | None:
    """A number of nodes or processes; the larger end of a range."""
    last = text.split(":")[-1]
    return int(last) if last.isdigit() and int(last) > 0 else None


def world_size(launch: Launch) -> tuple[int | None, str]:
    """How many ranks start, and why that is known, or is not."""
    launcher, _ = split(launch.argv)
    name = name_of(launcher[0]) if launcher else ""
    if name == "torchrun" or any(word in _DISTRIBUTED for word in launcher):
        return _torchrun(launch, launcher)
    if name == "deepspeed":
        return _product(
            ("--num_gpus", _option(launcher, "--num_gpus", "--num-gpus")),
            ("--num_nodes", _option(launcher, "--num_nodes", "--num-nodes")),
        )
    wrapper = next(
        (words for words in reversed(launch.within) if name_of(words[0]) in ("srun", "mpirun", "mpiexec")),
        None,
    )
    if wrapper is not None and name_of(wrapper[0]) != "srun":
        return _product(("mpirun -np", _option(wrapper, "-np", "-n", "--np", "-c")))
    if wrapper is not None:
        tasks = launch.environment.get("SLURM_NTASKS", "")
        if _count(tasks):
            return _count(tasks), f"srun starts {tasks} tasks"
        return None, "srun's --nodes and --ntasks-per-node are not said"
    given = launch.environment.get("WORLD_SIZE", "")
    if _count(given):
        return _count(given), f"WORLD_SIZE={given}"
    return None, "no launcher says how many ranks start"


def _torchrun(launch: Launch, launcher: Sequence[str]) -> tuple[int | None, str]:
    environment = launch.environment
    processes = _option(launcher, "--nproc-per-node", "--nproc_per_node")
    nodes = _option(launcher, "--nnodes")
    if processes is None:
        processes = environment.get("PET_NPROC_PER_NODE", "1")
    if nodes is None:
        nodes = environment.get("PET_NNODES", "1")
        around = environment.get("SLURM_NNODES", "1")
        if launch.within and around != "1":
            return None, f"--nnodes is not given to torchrun, which srun starts on {around} nodes"
    return _product(("--nproc-per-node", processes), ("--nnodes", nodes))


def _product(*factors: tuple[str, str | None]) -> tuple[int | None, str]:
    total = 1
    for name, text in factors:
        if text is None:
            return None, f"{name} is not given"
        if not text:
            return None, f"{name} has no value"
        count = _count(text)
        if count is None:
            shown = "the output of a program that was not run" if text == UNKNOWN else repr(text)
            return None, f"{name} is {shown}"
        total *= count
    return total, " x ".join(f"{name} {text}" for name, text in factors)


def known_launcher(word: str) -> bool:
    """Whether a command line may begin with ``word``."""
    return name_of(word) in (*RECORDED, *WRAPPERS, *PREFIXES, "python", "env") or word.startswith("--")
