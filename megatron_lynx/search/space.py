"""Every configuration of a job on so many devices: the sizes that Megatron accepts, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError
from megatron_lynx.hardware import Cluster
from megatron_lynx.job import Job, check_job, make_job
from megatron_lynx.schedule import check_microbatches
from megatron_lynx.spec import Batch, Model, Optimizer, Parallel

SIZES = ("tp", "pp", "vpp", "dp", "micro_batch_size", "sequence_parallel", "distributed_optimizer")
"""What is chosen, by name."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Config:
    """One choice of sizes. Layouts and plans are found for it."""

    tp: int
    pp: int
    vpp: int
    dp: int
    micro_batch_size: int
    sequence_parallel: bool
    distributed_optimizer: bool

    @property
    def parallel(self) -> Parallel:
        """The parallel sizes."""
        return Parallel(
            tp=self.tp, pp=self.pp, vpp=self.vpp, dp=self.dp, sequence_parallel=self.sequence_parallel
        )

    def __str__(self) -> str:
        sizes = [f"TP {self.tp}", f"PP {self.pp}", f"VPP {self.vpp}" if self.vpp > 1 else ""]
        sizes += [f"DP {self.dp}", f"batch {self.micro_batch_size}"]
        sizes += ["SP" if self.sequence_parallel else "", "DO" if self.distributed_optimizer else ""]
        return " ".join(size for size in sizes if size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked for: the fastest way to train ``model`` on ``devices`` devices of ``cluster``.

    ``fixed`` holds sizes (``SIZES``) that are given; ``max_tp`` bounds tensor parallelism.
    ``memory_bytes`` is what training may take on a device. ``profiles`` are measured costs, each for the
    configurations with its layer's shape (see ``extend``). ``optimizer`` says how its state is kept; whether
    it is distributed is part of a configuration.
    """

    model: Model
    cluster: Cluster
    devices: int
    seq_length: int
    global_batch_size: int
    memory_bytes: int | None = None
    max_tp: int | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    profiles: tuple[CostTable, ...] = ()
    optimizer: Optimizer = field(default_factory=Optimizer)

    def batch(self, config: Config) -> Batch:
        """The batch of a configuration."""
        return Batch(
            seq_length=self.seq_length,
            micro_batch_size=config.micro_batch_size,
            global_batch_size=self.global_batch_size,
        )

    def optimizer_of(self, config: Config) -> Optimizer:
        """The optimizer of a configuration, without what needs a distributed one if it is none."""
        if config.distributed_optimizer:
            return replace(self.optimizer, use_distributed_optimizer=True)
        return replace(
            self.optimizer,
            use_distributed_optimizer=False,
            num_distributed_optimizer_instances=1,
            use_precision_aware_optimizer=False,
            overlap_param_gather=False,
        )

    def job(self, config: Config, costs: CostTable | None = None) -> Job:
        """The job of a configuration, with costs of the cluster unless told."""
        return make_job(
            self.model,
            config.parallel,
            self.batch(config),
            cluster=self.cluster,
            costs=costs,
            memory_bytes=self.memory_bytes,
            optimizer=self.optimizer_of(config),
            check_split=False,
        )


def configurations(question: Question) -> tuple[Config, ...]:
    """Every configuration that Megatron accepts (layers need not divide: a layout deals them).

    Without data parallelism the distributed optimizer changes nothing, and is left out; the microbatches
    of a group of the interleaved schedule are Megatron's default, as many as stages.

    Raises:
        ConfigError: there is none; names what is in the way.
    """
    found = tuple(config for config in _all(question) if _accepted(question, config))
    if not found:
        fixed = " ".join(f"{name}={value}" for name, value in question.fixed.items())
        given = f"with --fixed {fixed.replace(' ', ',')}" if fixed else ""
        raise ConfigError(
            f"--devices {question.devices} --global-batch-size {question.global_batch_size}: Megatron "
            f"accepts no sizes {given} for {question.model.num_attention_heads} heads; "
            f"--global-batch-size {question.devices} without --fixed works"
        )
    return found


def _all(question: Question) -> Iterator[Config]:
    devices, layers = question.devices, question.model.num_layers
    most = question.max_tp or devices
    for tp in _divisors(devices):
        for pp in _divisors(devices // tp) if tp <= most else ():
            dp = devices // tp // pp
            if question.global_batch_size % dp:
                continue
            for micro in _divisors(question.global_batch_size // dp):
                for vpp in range(1, layers // pp + 1 if pp > 1 else 2):
                    config = Config(
                        tp=tp,
                        pp=pp,
                        vpp=vpp,
                        dp=dp,
                        micro_batch_size=micro,
                        sequence_parallel=False,
                        distributed_optimizer=False,
                    )
                    for sp in (False, True) if tp > 1 else (False,):
                        for do in (False, True) if dp > 1 else (False,):
                            yield replace(config, sequence_parallel=sp, distributed_optimizer=do)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _accepted(question: Question, config: Config) -> bool:
    if any(getattr(config, name) != value for name, value in question.fixed.items()):
        return False
    try:
        batch = question.batch(config)
        check_job(question.model, config.parallel, batch)
        check_microbatches(config.parallel, batch.num_microbatches(config.dp))
    except ConfigError:
        return False
    return True
