"""Trainer: carries ``--recompute-method lynx`` through a run of Megatron's own trainer.

The trainer builds the model; then a plan is read or made and bound to it; every step of the
schedule runs under it; at the end the model is given back. Nothing here runs without
``--recompute-method lynx``.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_args, print_rank_0

from megatron_lynx.cost import CostTable
from megatron_lynx.errors import ConfigError
from megatron_lynx.integration import versions
from megatron_lynx.integration.agree import gathered, on_every_rank
from megatron_lynx.integration.arguments import (
    budget_bytes,
    check_arguments,
    check_config,
    check_yaml,
    lynx_requested,
    with_lynx_arguments,
)
from megatron_lynx.integration.binding import layers_of
from megatron_lynx.integration.checkpoints import check_checkpoint
from megatron_lynx.integration.checks import check_layer, fixed_parts
from megatron_lynx.integration.cpu.backend import cpu_backend_active
from megatron_lynx.integration.describe import batch_of, device_of, model_of, optimizer_of, parallel_of
from megatron_lynx.integration.install import install
from megatron_lynx.integration.measuring.traced import kept_otherwise, said
from megatron_lynx.integration.planning import (
    Asked,
    counted_parameters,
    make_plan,
    read_plan,
    split_layout,
    split_of,
)
from megatron_lynx.integration.report import ReportWriter
from megatron_lynx.integration.session import Session
from megatron_lynx.integration.targets import TARGETS, Target
from megatron_lynx.integration.windows import Hooks, in_step
from megatron_lynx.layers import layer_graph
from megatron_lynx.plan import Plan
from megatron_lynx.search.given import counted_by

UNLIMITED_BYTES = 1 << 60
"""The budget where nobody named one and no device has one."""


class Trainer:
    """One run: the arguments it found, and the session once the model is built."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.session: Session | None = None

    def bind(self, wrapped_chunks: list[Any]) -> None:
        """Read or make the plan, and bind it to the model.

        Raises:
            ConfigError, PlanError, InfeasibleError: before the first step.
        """
        args = get_args()
        if not lynx_requested(args):
            return
        chunks = unwrap_model(wrapped_chunks)
        on_every_rank(lambda: check_model(args, chunks))
        print_rank_0(f"> lynx: {versions.untested_note() or versions.find_megatron()}")
        asked = _asked(args, chunks)
        plan, table = _plan(args, asked, chunks)
        described = layer_graph(asked.model, asked.parallel, asked.batch)
        if table is not None and asked.profile is None:
            kept = table.kept_bytes  # found as the layer was measured
        else:
            kept = kept_otherwise(chunks, asked.model, asked.parallel, asked.batch)
        if kept:
            explained = asked.fixed or any(trained < count for count, trained in asked.counted)
            print_rank_0(f"> lynx: {said(kept, described, strange=not explained)}")

        def start() -> None:
            stage = plan.stages[parallel_state.get_pipeline_model_parallel_rank()]
            graph = counted_by(described.keeping(kept), asked.model, plan)
            self.session = Session(
                self.hooks, stage, asked.parallel, chunks, graph, count_kept=bool(args.lynx_report)
            )
            if args.lynx_report:
                folder, rank = Path(args.lynx_report), torch.distributed.get_rank()
                ReportWriter(folder, rank, plan, table, asked).attach(self.session)

        on_every_rank(start)
        if table is not None:
            print_rank_0(f"> lynx: costs: {table.source}")
        print_rank_0(f"> lynx: {_summary(plan)}")

    @contextlib.contextmanager
    def step(self, microbatches: int) -> Iterator[None]:
        """A step of the schedule, under the session if there is one."""
        with self.session.step(microbatches) if self.session else contextlib.nullcontext():
            yield

    def close(self) -> None:
        """Give the model back."""
        if self.session is not None:
            self.session.close()
            self.session = None


def check_model(args: Namespace, chunks: list[Any]) -> None:
    """Refuse what shows only in the model that was built: the final configuration, the layers.

    Raises:
        ConfigError: names what does not work, and what does.
    """
    for chunk in chunks:
        if not isinstance(chunk, GPTModel):
            raise ConfigError(
                f"--recompute-method lynx trains GPTModel; {Path(sys.argv[0]).name} builds "
                f"{type(chunk).__name__}: --recompute-granularity selective works there"
            )
        check_config(get_model_config(chunk))
    for layer in layers_of(chunks):
        check_layer(layer)


def _asked(args: Namespace, chunks: list[Any]) -> Asked:
    """What the flags and the model ask for. Every rank must call it."""
    stages, layout = split_of(chunks)
    device = device_of(chunks)
    memory = budget_bytes(args) or min(gathered(_left_bytes(device)))  # rank 0 plans for all
    return Asked(
        model=model_of(args, get_model_config(chunks[0]), device),
        parallel=parallel_of(args),
        batch=batch_of(args),
        memory_bytes=memory or UNLIMITED_BYTES,
        planner=args.lynx_planner or ("opt" if memory else "windows"),
        layout=args.pipeline_model_parallel_layout or layout,
        stages=stages,
        counted=counted_parameters(chunks),
        fixed=fixed_parts(chunks),
        optimizer=optimizer_of(args),
        profile=Path(args.lynx_profile) if args.lynx_profile else None,
    )


def _plan(args: Namespace, asked: Asked, chunks: list[Any]) -> tuple[Plan, CostTable | None]:
    """The plan of ``--lynx-plan``, or one made now; and the costs that it was made from."""
    if args.lynx_plan:
        return on_every_rank(lambda: read_plan(Path(args.lynx_plan), asked)), None
    return make_plan(asked, chunks)


RESERVE = 0.08
"""The part of a GPU that is left alone without ``--lynx-budget``: the CUDA context, NCCL's buffers (some
hundred MiB for each communicator, most of them made at its first use) and the allocator's fragments."""


def _device_bytes(device: torch.device) -> int:
    """What training may take on a GPU, the same on each of a kind: all of it but ``RESERVE``; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory * (1 - RESERVE))


def _left_bytes(device: torch.device) -> int:
    """The same, but less where so much is taken outside of PyTorch already (context, communicators, other
    processes) that half of the reserve is not left beside it."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return min(_device_bytes(device), int(total * (1 - RESERVE / 2)) - outside)


def _split(args: Namespace) -> None:
    """Carry out ``--lynx-partition``: set the layout that the user left open, and say so."""
    cuda = torch.cuda.is_available() and torch.version.cuda is not None
    device = torch.device("cuda" if cuda and not cpu_backend_active() else "cpu")
    memory = budget_bytes(args) or _device_bytes(device) or UNLIMITED_BYTES
    layout = split_layout(args, memory)
    args.pipeline_model_parallel_layout = layout
    found = "keeps the even split" if layout is None else f"--pipeline-model-parallel-layout '{layout}'"
    print_rank_0(f"> lynx: --lynx-partition {args.lynx_partition}: {found}")


def _summary(plan: Plan) -> str:
    dropped = sum(len(layer.choices) for stage in plan for layer in stage.layers)
    layers = sum(len(stage.layers) for stage in plan)
    if not dropped:
        return f"planner {plan.planner}: everything fits, nothing is recomputed"
    return f"planner {plan.planner}: {dropped} regions of {layers} layers are dropped and rebuilt"


@contextlib.contextmanager
def lynx_trainer() -> Iterator[Trainer]:
    """Everything that a run of Megatron's trainer needs, until the block ends: the flags, and
    what they ask for. Megatron's arguments must be parsed inside."""
    hooks = Hooks()
    trainer = Trainer(hooks)
    targets = (*TARGETS, *trainer_targets(trainer))
    with install(hooks, targets):
        try:
            yield trainer
        finally:
            trainer.close()


def trainer_targets(trainer: Trainer) -> tuple[Target, ...]:
    """The names that are replaced in Megatron's trainer, beside those of every run."""

    def setup(original: Callable[..., Any], _: Hooks) -> Callable[..., Any]:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            trainer.bind(result[0])
            return result

        return setup_model_and_optimizer

    def schedule(original: Callable[..., Any], _: Hooks) -> Callable[..., Any]:
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            return in_step(original(*args, **kwargs), trainer.step)

        return get_forward_backward_func

    # Patched where the trainer uses them: neither the model builder nor the schedule can be injected
    # into a script that calls pretrain() by itself.
    return (
        Target("megatron.training.training.setup_model_and_optimizer", setup),
        Target("megatron.training.training.get_forward_backward_func", schedule),
        *argument_targets(),
    )


def argument_targets() -> tuple[Target, ...]:
    """The names that teach Megatron's parser lynx's flags, and refuse what does not work."""

    def parse(original: Callable[..., Any], _: Hooks) -> Callable[..., Any]:
        def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
            check_yaml(sys.argv[1:])
            return original(with_lynx_arguments(extra_args_provider), ignore_unknown_args)

        return parse_args

    def validate(original: Callable[..., Any], _: Hooks) -> Callable[..., Any]:
        def validate_args(args: Any, *more: Any, **kwargs: Any) -> Any:
            check_arguments(args)
            if lynx_requested(args) and args.lynx_partition != "keep":
                _split(args)
            validated = original(args, *more, **kwargs)
            check_checkpoint(args)
            return validated

        return validate_args

    return (
        Target("megatron.training.arguments.parse_args", parse),
        Target("megatron.training.arguments.validate_args", validate),
        Target("megatron.training.initialize.parse_args", parse),
        Target("megatron.training.initialize.validate_args", validate),
    )
