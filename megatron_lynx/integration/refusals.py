"""What does not work beside ``--recompute-method lynx``: one row each, with what works instead.

A row is looked up twice: in the parsed arguments, before anything starts, and in the configuration of the
model that was built, where a script of its own or a flag that Megatron derives others from has set it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lynx.errors import ConfigError
from megatron_lynx.layers import KINDS

OFF = (None, False, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A flag that does not work beside ``--recompute-method lynx``, and what does.

    ``fields`` are its names among Megatron's parsed arguments, ``config`` those in its TransformerConfig;
    ``allowed`` the values of both that ask for nothing. ``reason`` says what would go wrong.
    """

    flag: str
    fields: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    instead: str = "leave it out"
    reason: str
    allowed: tuple[Any, ...] = OFF

    def check(self, owner: Any, names: tuple[str, ...]) -> None:
        """Look at ``names`` of ``owner``; what it does not have asks for nothing.

        Raises:
            ConfigError: one of them asks for what does not work.
        """
        for name in names:
            value = getattr(owner, name, None)
            if not any(value == one and type(value) is type(one) for one in self.allowed):  # True is no 1
                raise ConfigError(
                    f"--recompute-method lynx does not work with {self.flag} {_shown(value)}: {self.reason}; "
                    f"{self.instead}"
                )


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _same(flag: str, *names: str, reason: str, **more: Any) -> Refusal:
    """A row whose names are the same among the arguments and in the configuration."""
    return Refusal(flag=flag, fields=names, config=names, reason=reason, **more)


_TWICE = "two methods would recompute the same layer"
_OFFLOAD = "its own saved-tensor hooks take the tensors that lynx drops"
_GRAPHS = "a graph that is played back asks nobody what to keep"
_FP8 = "running a layer again would move its scaling factors"
_SHARDED = "its weights are not at hand when a layer is run again"
_KIND = "the layer is none of the kinds that are described"

REFUSALS = (
    Refusal(flag="--recompute-activations", fields=("recompute_activations",), reason=_TWICE),
    _same("--recompute-granularity", "recompute_granularity", reason=_TWICE,
          instead="leave it out: lynx decides by region"),
    _same("--recompute-num-layers", "recompute_num_layers", reason=_TWICE, allowed=(None,),
          instead="leave it out: the plan says how many"),
    Refusal(flag="--recompute-modules", fields=("recompute_modules",), allowed=(None, []),
            reason="nothing would read it", instead="leave it out: the plan says which regions"),
    _same("--moe-layer-recompute", "moe_layer_recompute", reason=_TWICE),
    _same("--distribute-saved-activations", "distribute_saved_activations", reason=_TWICE,
          instead="--sequence-parallel works"),
    Refusal(flag="--cpu-offloading-num-layers", fields=("cpu_offloading_num_layers",),
            config=("cpu_offloading",), reason=_OFFLOAD, allowed=(None, False, 0)),
    _same("--fine-grained-activation-offloading", "fine_grained_activation_offloading", reason=_OFFLOAD),
    Refusal(flag="--fp8-format", fields=("fp8",), config=("fp8",), reason=_FP8, instead="--bf16 works"),
    Refusal(flag="--fp4-format", fields=("fp4",), config=("fp4",), reason=_FP8, instead="--bf16 works"),
    Refusal(flag="--te-precision-config-file", fields=("te_precision_config_file",), reason=_FP8,
            instead="--bf16 works"),
    _same("--cuda-graph-impl", "cuda_graph_impl", reason=_GRAPHS, allowed=(None, False, "none"),
          instead="--cuda-graph-impl none works"),
    _same("--enable-cuda-graph", "enable_cuda_graph", reason=_GRAPHS),
    _same("--external-cuda-graph", "external_cuda_graph", reason=_GRAPHS),
    _same("--overlap-moe-expert-parallel-comm", "overlap_moe_expert_parallel_comm",
          reason="it interleaves the layers of two microbatches"),
    _same("--delay-wgrad-compute", "delay_wgrad_compute",
          reason="Megatron takes it only where the layers of two microbatches are interleaved"),
    _same("--tp-comm-overlap", "tp_comm_overlap",
          reason="its collectives run inside a GEMM and cannot be waited for"),
    Refusal(flag="--num-experts", fields=("num_experts",), config=("num_moe_experts",), allowed=(None, 0),
            reason="running a router again would count its tokens twice", instead="dense models work"),
    Refusal(flag="--use-megatron-fsdp", fields=("use_megatron_fsdp",), reason=_SHARDED,
            instead="--use-distributed-optimizer works"),
    Refusal(flag="--use-torch-fsdp2", fields=("use_torch_fsdp2",), reason=_SHARDED,
            instead="--use-distributed-optimizer works"),
    Refusal(flag="--tensor-parallel-num-weight-shards", fields=("tensor_parallel_num_weight_shards",),
            config=("gtp_weight_remat_size",), reason=_SHARDED),
    _same("--mlp-chunks-for-training", "mlp_chunks_for_training", instead="1 works",
          reason="the MLP runs several times in one forward"),
    _same("--hybrid-context-parallel", "hybrid_context_parallel",
          reason="a microbatch runs in parts of changing length"),
    _same("--use-transformer-engine-op-fuser", "use_transformer_engine_op_fuser", reason=_KIND),
    _same("--fp32-residual-connection", "fp32_residual_connection",
          reason="Megatron itself stops at the first norm, which takes no fp32 beside 16-bit weights"),
    Refusal(flag="enable_autocast", config=("enable_autocast",),
            reason="a region that runs again in a backward would run outside of autocast"),
    _same("--multi-latent-attention", "multi_latent_attention", reason=_KIND,
          instead="--group-query-attention works"),
    _same("--experimental-attention-variant", "experimental_attention_variant", reason=_KIND),
    Refusal(flag="--hybrid-layer-pattern", fields=("hybrid_layer_pattern",), reason=_KIND,
            instead="--num-layers works"),
    Refusal(flag="--hybrid-override-pattern", fields=("hybrid_override_pattern",), reason=_KIND,
            instead="--num-layers works"),
    Refusal(flag="--heterogeneous-layers-config-path", fields=("heterogeneous_layers_config_path",),
            config=("heterogeneous_block_specs",), reason=_KIND),
    Refusal(flag="--te-rng-tracker", fields=("te_rng_tracker",), config=("use_te_rng_tracker",),
            reason="its random states cannot be copied for a second run of a region"),
    Refusal(flag="num_microbatches_with_partial_activation_checkpoints",
            config=("num_microbatches_with_partial_activation_checkpoints",), allowed=(None,), reason=_TWICE),
    _same("--transformer-impl", "transformer_impl", reason=_KIND, allowed=(None, *KINDS),
          instead=f"--transformer-impl {' or '.join(KINDS)} works"),
    _same("--moe-paged-stash", "moe_paged_stash", reason=_OFFLOAD),
    _same("--enable-hyper-connections", "enable_hyper_connections", reason=_KIND),
    _same("--enable-mhc-connections", "enable_mhc_connections", reason=_KIND),
    _same("--head-wise-attn-gate", "head_wise_attn_gate", reason=_KIND),
)  # fmt: skip
"""Combinations that are refused. Those keyed on ``--recompute-granularity`` in Megatron (offloading, CUDA
graphs, distributed activations) do not fire under lynx, so they stand here too."""

NEWER = {
    "enable_mhc_connections": "upstream's main branch",
    "enable_hyper_connections": "upstream's dev branch",
    "head_wise_attn_gate": "upstream's dev branch",
}
"""Names in the table that no released Megatron has yet, and where they are."""
