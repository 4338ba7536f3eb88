"""Megatron's flags that become fields of the job: each flag and its field, by how its value is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INT: Mapping[str, str] = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "num-attention-heads": "num_attention_heads",
    "kv-channels": "kv_channels",
    "ffn-hidden-size": "ffn_hidden_size",
    "max-position-embeddings": "max_position_embeddings",
    "vocab-size": "vocab_size",
    "padded-vocab-size": "vocab_size",
    "pad-vocab-size-to": "vocab_size",
    "extra-vocab-size": "extra_vocabulary",
    "num-query-groups": "num_query_groups",
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "vpp",
    "num-layers-per-virtual-pipeline-stage": "layers_per_virtual_stage",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size",
    "decoder-first-pipeline-num-layers": "first_stage_layers",
    "decoder-last-pipeline-num-layers": "last_stage_layers",
    "seq-length": "seq_length",
    "mtp-num-layers": "mtp_num_layers",
    "micro-batch-size": "micro_batch_size",
    "global-batch-size": "global_batch_size",
    "num-distributed-optimizer-instances": "num_distributed_optimizer_instances",
}
"""Whole numbers."""

FLOAT: Mapping[str, str] = {
    "attention-dropout": "attention_dropout",
    "hidden-dropout": "hidden_dropout",
    "rotary-percent": "rotary_percent",
    "activation-func-clamp-value": "activation_func_clamp_value",
    "optimizer-offload-fraction": "optimizer_offload_fraction",
}
"""Numbers."""

TEXT: Mapping[str, str] = {
    "position-embedding-type": "position_embedding_type",
    "normalization": "normalization",
    "softmax-type": "softmax_type",
    "window-size": "window_size",
    "pipeline-model-parallel-layout": "layout",
    "recompute-granularity": "recompute_granularity",
    "transformer-impl": "transformer_impl",
    "attention-backend": "attention_backend",
    "cross-entropy-fusion-impl": "cross_entropy_fusion_impl",
    "main-grads-dtype": "main_grads_dtype",
    "main-params-dtype": "main_params_dtype",
    "exp-avg-dtype": "exp_avg_dtype",
    "exp-avg-sq-dtype": "exp_avg_sq_dtype",
}
"""Words."""

SWITCH: Mapping[str, tuple[str, Any]] = {
    "swiglu": ("swiglu", True),
    "disable-bias-linear": ("add_bias_linear", False),
    "untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", True),
    "attention-softmax-in-fp32": ("attention_softmax_in_fp32", True),
    "sequence-parallel": ("sequence_parallel", True),
    "use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "no-bias-gelu-fusion": ("no_gelu_fusion", True),
    "no-bias-swiglu-fusion": ("no_swiglu_fusion", True),
    "group-query-attention": ("group_query_attention", True),
    "bf16": ("dtype_bytes", 2),
    "fp16": ("dtype_bytes", 2),
    "squared-relu": ("squared_relu", True),
    "quick-geglu": ("quick_geglu", True),
    "qk-layernorm": ("qk_layernorm", True),
    "attention-output-gate": ("attention_output_gate", True),
    "use-te-activation-func": ("use_te_activation_func", True),
    "no-rope-fusion": ("apply_rope_fusion", False),
    "account-for-embedding-in-pipeline-split": ("embedding_counts", True),
    "account-for-loss-in-pipeline-split": ("loss_counts", True),
    "use-distributed-optimizer": ("use_distributed_optimizer", True),
    "use-precision-aware-optimizer": ("use_precision_aware_optimizer", True),
    "accumulate-allreduce-grads-in-fp32": ("accumulate_allreduce_grads_in_fp32", True),
    "grad-reduce-in-bf16": ("grad_reduce_in_bf16", True),
    "no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
    "overlap-grad-reduce": ("overlap_grad_reduce", True),
    "overlap-param-gather": ("overlap_param_gather", True),
    "optimizer-cpu-offload": ("optimizer_cpu_offload", True),
    "apply-query-key-layer-scaling": ("attention_softmax_in_fp32", True),
    "no-masked-softmax-fusion": ("masked_softmax_fusion", False),
    "no-create-attention-mask-in-dataloader": ("mask_from_data", False),
    "cross-entropy-loss-fusion": ("cross_entropy_loss_fusion", True),
    "use-flash-attn": ("attention_backend", "flash"),
}
"""Flags without a value: the field, and what they set it to."""
