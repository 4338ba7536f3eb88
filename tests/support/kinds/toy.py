"""A toy kind of layer in one file: a norm, a linear, a residual. The description, and the layer itself.

It stands where a new kind of a user would: everything that plans and trains takes it from here alone.
The linear is split by column and its output gathered, so it communicates in forward and in backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_lynx.graph import INPUT, LayerGraph, Region, Storage
from megatron_lynx.layers.kind import Kernel, LayerKind, LayerWork, Mask, Operation, Submodule
from megatron_lynx.layers.storages import norm_stats_bytes
from megatron_lynx.spec import Batch, Model, Parallel

if TYPE_CHECKING:
    import torch

PARTS = (
    Submodule("norm", "norm", ("LayerNorm",)),
    Submodule("linear", "linear", ("ColumnParallelLinear",), gemm=True),
    Mask("dropout", inside="residual"),
    Operation("residual", "residual"),
)


def _graph(model: Model, parallel: Parallel, batch: Batch) -> LayerGraph:
    rows = batch.seq_length * batch.micro_batch_size
    hidden, stats = (
        rows * model.hidden_size * model.dtype_bytes,
        norm_stats_bytes(model, rows, model.hidden_size),
    )
    talks = parallel.tp > 1
    return LayerGraph(
        regions=(
            Region(name=INPUT, communicates=talks),
            Region(name="norm", reads=("input",)),
            Region(name="linear", reads=("norm.out",), communicates=talks),
            Region(name="dropout", draws=True),
            Region(name="residual", reads=("input", "linear.out"), draws=True),
        ),
        storages=(
            Storage(name="input", producer=INPUT, size_bytes=hidden, saved_by=("norm",)),
            Storage(name="norm.out", producer="norm", size_bytes=hidden, saved_by=("linear",)),
            Storage(name="norm.stats", producer="norm", size_bytes=stats, saved_by=("norm",)),
            Storage(name="linear.out", producer="linear", size_bytes=hidden),
            Storage(
                name="dropout.mask",
                producer="dropout",
                size_bytes=rows * model.hidden_size * model.mask_bytes,
                saved_by=("residual",),
            ),
        ),
    )


def _work(model: Model, parallel: Parallel, batch: Batch) -> LayerWork:
    rows, e = batch.seq_length * batch.micro_batch_size, model.dtype_bytes
    hidden, outer = rows * model.hidden_size * e, model.hidden_size // parallel.tp
    around = {name: (Kernel(0, 3 * hidden),) for name in ("norm", "dropout", "residual")}
    linear = (rows, model.hidden_size, outer, e)
    return LayerWork(
        forward={**around, "linear": (Kernel.product(*linear),)},
        dgrad={**around, "linear": (Kernel.product(rows, outer, model.hidden_size, e),)},
        wgrad={"linear": (Kernel.weight_gradient(*linear),)},
    )


def _waits(parallel: Parallel) -> tuple[str, ...]:
    return ("linear",) if parallel.tp > 1 else ()


def _workspace(model: Model, parallel: Parallel, batch: Batch) -> tuple[int, ...]:
    return (2 * batch.seq_length * batch.micro_batch_size * model.hidden_size * model.dtype_bytes,)


KIND = LayerKind(
    name="toy",
    layer_class="ToyLayer",
    parts=PARTS,
    cuts=(),
    graph=_graph,
    forward_slots=_waits,
    backward_slots=_waits,
    beside=frozenset(("linear",)),
    work=_work,
    workspace_bytes=_workspace,
    parameters=lambda model, tp: model.hidden_size * (model.hidden_size + 1) // tp + 2 * model.hidden_size,
)


def toy_spec() -> Any:
    """Megatron's spec of the layer; asked for where Megatron is installed only."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset

    class ToyLayer(MegatronModule, BaseTransformerLayer):
        """x + dropout(linear(norm(x)))."""

        def __init__(
            self, config: Any, *_: Any, layer_number: int, vp_stage: int | None, pg_collection: Any, **__: Any
        ):
            super().__init__(config)
            self.layer_number = layer_number + get_transformer_layer_offset(config, vp_stage)
            self.tp_group = pg_collection.tp
            width = config.hidden_size
            self.norm = WrappedTorchNorm(config, width, config.layernorm_epsilon)
            self.linear = ColumnParallelLinear(
                width,
                width,
                config=config,
                init_method=config.init_method,
                gather_output=True,
                tp_group=self.tp_group,
            )
            self.residual = get_bias_dropout_add

        def forward(
            self, hidden_states: torch.Tensor, attention_mask: Any = None, **_: Any
        ) -> tuple[torch.Tensor, None]:
            """The layer's output, and no context."""
            operation = self.residual(self.training, False)
            out = self.linear(self.norm(hidden_states))
            return operation(out, hidden_states, self.config.hidden_dropout), None

    return ModuleSpec(module=ToyLayer)
