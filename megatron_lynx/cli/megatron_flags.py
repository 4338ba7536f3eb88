"""Every flag of Megatron's parser, sorted by what it does to a plan.

- *planned*: it becomes a field of the job (``megatron_args``);
- ``REFUSED``: the job would be of a kind that is not planned; says what is possible instead;
- ``COMPANIONS``: it matters only beside a flag that is refused or named;
- ``UNMODELLED``: it changes memory or time, by something that the figures leave out; it is named;
- ``WITHOUT_EFFECT``: it changes no plan: data, learning rates, logs, checkpoints.

A name may end in ``*``. A test holds that every flag of the tested Megatron has exactly one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

_DENSE = "a mixture of experts is not planned; --ignore num-experts plans its layers as dense ones"
_SHAPES = "layers of several shapes are not planned; --ignore {flag} plans equal ones"
_HYBRID = "a hybrid model is not planned; --num-layers alone works"
_FSDP = "FSDP is not planned; --ignore {flag} plans it with --use-distributed-optimizer in its place"
_GRAPHS = "CUDA graphs are not planned; --ignore {flag} plans it without"
_OFFLOAD = "offloading is not planned; --ignore {flag} plans what stays on the device"
_OFFLOADED_PARTS = (
    "no plan is made beside offloading; --ignore {flag} plans without, and lynx compare has a row for it"
)
_FP8 = "8- and 4-bit training is not planned; --ignore {flag} plans it in 16 bits"

REFUSED: Mapping[str, str] = {
    "num-experts": _DENSE,
    "multi-latent-attention": "multi-latent attention is not planned; --ignore multi-latent-attention plans "
    "ordinary attention of the same heads",
    "experimental-attention-variant": "experimental attention is not planned; --ignore {flag} plans "
    "ordinary attention",
    "linear-attention-freq": "linear attention is not planned; --ignore {flag} plans ordinary attention",
    "fp8-format": _FP8,
    "fp8": _FP8,
    "fp4-format": _FP8,
    "te-precision-config-file": _FP8,
    "context-parallel-size": "context parallelism is planned as a run begins, not before it; 1 works, or "
    "--ignore {flag}, which plans whole sequences",
    "hybrid-context-parallel": "context parallelism is not planned; --ignore {flag} plans whole sequences",
    "hybrid-layer-pattern": _HYBRID,
    "hybrid-override-pattern": _HYBRID,
    "is-hybrid-model": _HYBRID,
    "mtp-hybrid-override-pattern": _HYBRID,
    "heterogeneous-layers-config-path": _SHAPES,
    "heterogeneous-layers-config-encoded-json": _SHAPES,
    "encoder-num-layers": "an encoder is not planned; --num-layers works for a decoder",
    "decoder-num-layers": "an encoder is not planned; --num-layers works for a decoder",
    "use-megatron-fsdp": _FSDP,
    "use-torch-fsdp2": _FSDP,
    "enable-cuda-graph": _GRAPHS,
    "external-cuda-graph": _GRAPHS,
    "cuda-graph-impl": _GRAPHS,
    "cpu-offloading": _OFFLOAD,
    "cpu-offloading-num-layers": _OFFLOAD,
    "fine-grained-activation-offloading": _OFFLOADED_PARTS,
    "tensor-parallel-num-weight-shards": "sharded weights are not planned; --ignore {flag} plans whole ones",
    "mtp-standalone": "multi-token prediction is not planned; --ignore {flag} plans the main model",
    "moe-paged-stash": _OFFLOAD,
    "mlp-chunks-for-training": "an MLP in chunks is not planned; 1 works, or --ignore {flag}",
    "model-parallel-size": "Megatron takes --tensor-model-parallel-size in its place; that works",
    "batch-size": "Megatron takes --micro-batch-size in its place; that works",
    "warmup": "Megatron takes --lr-warmup-fraction in its place; that works",
    "spec": "layers of a --spec of one's own are not known; --ignore spec plans Megatron's",
    "freeze-all-layers": "frozen layers are not planned; --ignore {flag} plans layers that train",
    "deepspeed": "ZeRO and DeepSpeed's pipeline are not planned; --ignore deepspeed plans it on Megatron's",
    "perform-rl-step": "reinforcement learning is not planned; --ignore {flag} plans its training steps",
    "use-legacy-models": "the older model code is not planned; --ignore {flag} plans Megatron-Core's",
    "vision-pretraining": "vision models are not planned; a GPT works",
}
"""Flag -> why, and what works. ``{flag}`` stands for the flag."""

AT_START = ("context-parallel-size",)
"""Those with which lynx trains all the same: a run makes its plan from what it measures as it begins."""

HARMLESS: Mapping[str, frozenset[str]] = {
    "context-parallel-size": frozenset({"1"}),
    "cpu-offloading-num-layers": frozenset({"0"}),
    "cuda-graph-impl": frozenset({"none"}),
    "mlp-chunks-for-training": frozenset({"1"}),
    "tensor-parallel-num-weight-shards": frozenset({"1"}),
    "expert-model-parallel-size": frozenset({"1"}),
    "num-experts": frozenset({"0"}),
    "make-vocab-size-divisible-by": frozenset({"128"}),
    "optimizer": frozenset({"adam"}),
    "empty-unused-memory-level": frozenset({"0"}),
}
"""Values with which such a flag asks for what is planned anyway."""

COMPANIONS: Mapping[str, str] = {
    "moe-*": "num-experts",
    "expert-*": "num-experts",
    "use-grouped-gemm-for-shared-expert": "num-experts",
    "use-grouped-gemm-for-dense-mlp": "num-experts",
    "overlap-moe-expert-parallel-comm": "num-experts",
    "overlap-dispatch-backward-with-experts-wgrad": "num-experts",
    "ep-overlap-early-attn-memory-release": "num-experts",
    "high-priority-a2a-comm-stream": "num-experts",
    "q-lora-rank": "multi-latent-attention",
    "kv-lora-rank": "multi-latent-attention",
    "qk-head-dim": "multi-latent-attention",
    "qk-pos-emb-head-dim": "multi-latent-attention",
    "v-head-dim": "multi-latent-attention",
    "rotary-scaling-factor": "multi-latent-attention",
    "mscale": "multi-latent-attention",
    "mscale-all-dim": "multi-latent-attention",
    "cache-mla-latents": "multi-latent-attention",
    "mla-down-proj-fusion": "multi-latent-attention",
    "dsa-*": "experimental-attention-variant",
    "no-dsa-*": "experimental-attention-variant",
    "disable-dsa-*": "experimental-attention-variant",
    "linear-conv-kernel-dim": "linear-attention-freq",
    "linear-key-head-dim": "linear-attention-freq",
    "linear-value-head-dim": "linear-attention-freq",
    "linear-num-*": "linear-attention-freq",
    "hierarchical-context-parallel-sizes": "context-parallel-size",
    "max-seqlen-per-dp-cp-rank": "context-parallel-size",
    "cp-comm-type": "context-parallel-size",
    "fp8-*": "fp8-format",
    "no-fp8-wgrad": "fp8-format",
    "disable-fp8-wgrad": "fp8-format",
    "first-last-layers-bf16": "fp8-format",
    "num-layers-at-*-in-bf16": "fp8-format",
    "keep-fp8-transpose-cache": "fp8-format",
    "reuse-grad-buf-for-mxfp8-param-ag": "fp8-format",
    "fp4-*": "fp4-format",
    "mamba-*": "is-hybrid-model",
    "disable-mamba-mem-eff-path": "is-hybrid-model",
    "megatron-fsdp-*": "use-megatron-fsdp",
    "fsdp-*": "use-megatron-fsdp",
    "data-parallel-sharding-strategy": "use-megatron-fsdp",
    "outer-dp-sharding-strategy": "use-megatron-fsdp",
    "enable-full-sharding-in-hsdp": "use-megatron-fsdp",
    "suggested-communication-unit-size": "use-megatron-fsdp",
    "create-all-gather-group": "use-megatron-fsdp",
    "torch-fsdp2-no-reshard-after-forward": "use-torch-fsdp2",
    "no-strict-fsdp-dtensor-load": "use-megatron-fsdp",
    "disable-strict-fsdp-dtensor-load": "use-megatron-fsdp",
    "cuda-graph-*": "cuda-graph-impl",
    "cpu-offloading-retain-pinned-cpu-buffers": "cpu-offloading",
    "offload-modules": "fine-grained-activation-offloading",
    "min-offloaded-tensor-size": "fine-grained-activation-offloading",
    "delay-offload-until-cuda-graph": "fine-grained-activation-offloading",
    "delta-offload-bytes-across-pp-ranks": "fine-grained-activation-offloading",
    "activation-offload-fraction": "fine-grained-activation-offloading",
    "fine-grained-offloading-max-inflight-offloads": "fine-grained-activation-offloading",
    "rl-*": "perform-rl-step",
    "no-rl-*": "perform-rl-step",
    "grpo-*": "perform-rl-step",
    "langrl-env-config": "perform-rl-step",
    "refit-method": "perform-rl-step",
    "zero-stage": "deepspeed",
    "deepspeed_config": "deepspeed",
    "deepspeed-activation-checkpointing": "deepspeed",
    "use-fused-weighted-squared-relu": "num-experts",
    "no-tp-comm-*": "tp-comm-overlap",
    "disable-tp-comm-*": "tp-comm-overlap",
}
"""Flag -> the flag beside which it matters, which is refused or named itself."""

_OPTIMIZER, _OFFLOADED = "bytes of the optimizer's state", "time of the optimizer's offloaded part"
_REDUCTION, _TENSOR = "time of the gradients' reduction", "time of tensor-parallel collectives"
_EXTRA = "memory and time of one more operation a layer"

UNMODELLED: Mapping[str, str] = {
    "optimizer-offload-policy": _OFFLOADED,
    "use-torch-optimizer-for-cpu-offload": _OFFLOADED,
    "overlap-cpu-optimizer-d2h-h2d": _OFFLOADED,
    "no-pin-cpu-*": _OFFLOADED,
    "qk-l2-norm": _EXTRA,
    "qk-clip": _EXTRA,
    "mtp-use-repeated-layer": "parameters of prediction layers, which are those of one",
    "add-qkv-bias": "parameters of the QKV bias",
    "fp32-residual-connection": "residuals in fp32 take twice the memory",
    "apply-residual-connection-post-layernorm": "which tensor the residual keeps",
    "mrope-section": "the rotary embedding's factors",
    "window-attn-skip-freq": "time of attention",
    "no-rope-freq": "layers without rotary embedding",
    "fused-residual-rmsnorm": "one tensor less a norm",
    "use-transformer-engine-op-fuser": "which tensors fused operations save",
    "use-kitchen-attention": "kernels of attention",
    "kitchen-attention-backend": "kernels of attention",
    "flash-attention-version": "time of attention",
    "no-bias-dropout-fusion": "time of bias and dropout",
    "rope-type": "the rotary embedding's kernels",
    "no-persist-layer-norm": "time of norms",
    "disable-jit-fuser": "time of elementwise kernels",
    "deterministic-mode": "time of deterministic kernels",
    "batch-invariant-mode": "time of batch-invariant kernels",
    "disable-bf16-reduced-precision-matmul": "time of GEMMs",
    "fp16-lm-cross-entropy": "memory of the loss",
    "calculate-per-token-loss": "one small reduction a step",
    "tp-comm-*": _TENSOR,
    "symmetric-ar-type": _TENSOR,
    "use-ring-exchange-p2p": "time of pipeline transfers",
    "no-overlap-p2p-communication": "time of pipeline transfers",
    "overlap-p2p-communication-warmup-flush": "time of pipeline transfers",
    "pipeline-model-parallel-comm-backend": "time of pipeline transfers",
    "delay-wgrad-compute": "order of weight gradients",
    "defer-embedding-wgrad-compute": "order of weight gradients",
    "wgrad-deferral-limit": "order of weight gradients",
    "overlap-param-gather-with-optimizer-step": _REDUCTION,
    "no-align-param-gather": _REDUCTION,
    "no-align-grad-reduce": _REDUCTION,
    "ddp-*": _REDUCTION,
    "use-nccl-ub": _REDUCTION,
    "disable-symmetric-registration": _REDUCTION,
    "no-gradient-reduce-div-fusion": _REDUCTION,
    "use-sharp": _REDUCTION,
    "sharp-enabled-group": _REDUCTION,
    "high-priority-stream-groups": _REDUCTION,
    "nccl-communicator-config-path": "time of collectives",
    "no-use-layer-wise-param-layout": _OPTIMIZER,
    "optimizer": _OPTIMIZER,
    "optimizer-cuda-graph": "time of the optimizer's step",
    "empty-unused-memory-level": "time to hand memory back",
    "use-tp-pp-dp-mapping": "which links the groups use",
    "tp-pp-dp-mapping": "which links the groups use",
    "decrease-batch-size-if-needed": "the batch, where it does not divide",
    "rampup-batch-size": "a growing batch: --global-batch-size is planned",
    "step-batch-size-schedule": "a growing batch: --global-batch-size is planned",
    "no-clone-scatter-output-in-embedding": "memory of the embedding",
    "disable-clone-scatter-output-in-embedding": "memory of the embedding",
    "reset-attention-mask": "an attention mask of its own for each sample",
    "dataloader-inter-document-masking": "time of attention",
    "sft": "packed sequences of any length",
    "num-layer-per-virtual-pipeline-stage": "VPP",
    "distribute-saved-activations": "memory of Megatron's full recomputation",
    "embed-layernorm": "one norm after the embedding",
    "log-max-attention-logit": "one reduction a layer",
    "rerun-mode": "memory of a second run",
    "no-position-embedding": "parameters of positions",
    "make-vocab-size-divisible-by": "the padded vocabulary, which is taken as a multiple of 128 x TP",
    "no-pad-vocab-size": "the padded vocabulary, which is taken as a multiple of 128 x TP",
    "disable-pad-vocab-size": "the padded vocabulary, which is taken as a multiple of 128 x TP",
    "disable-align-grad-reduce": _REDUCTION,
}
"""Flag -> what of memory or time it changes and the figures leave out."""

_DATA = """
train-data-path valid-data-path test-data-path data-path data-args-path per-split-data-args-path
per-dataset-sequences-path phase-transition-iterations split dataloader-fast-cache-load
dataloader-defer-npy-index-mmap data-cache-path no-mmap-bin-files mock-data sample-rate mask-prob
short-seq-prob num-workers reset-position-ids eod-mask-loss num-dataset-builder-threads
object-storage-cache-path mid-level-dataset-surplus allow-ambiguous-pad-tokens fim-* vocab-file
merge-file vocab-extra-ids tokenizer-model tokenizer-metadata tokenizer-special-tokens tiktoken-*
tokenizer-sentencepiece-legacy no-tokenizer-* disable-tokenizer-* tokenizer-hf-* trust-remote-code
null-tokenizer-* chat-template dataloader-type data-impl train-weighted-split-paths-path
valid-weighted-split-paths-path tokenizer-name-or-path valid-num-workers sft-tokenizer-prompt-format
"""
_LEARNING = """
lr lr-* min-lr decoupled-lr decoupled-min-lr override-opt?param-scheduler
use-checkpoint-opt?param-scheduler start-weight-decay end-weight-decay weight-decay-incr-style
weight-decay apply-wd-to-qk-layernorm clip-grad adam-beta1 adam-beta2 adam-eps sgd-momentum muon-* lion-*
no-weight-decay-cond-type seed init-method-std embedding-init-method-std init-method-xavier-uniform
use-mup mup-* loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis norm-epsilon
layernorm-epsilon rotary-base rotary-seq-len-interpolation-factor use-rope-scaling rope-scaling-factor
yarn-* no-yarn-* relative-attention-* qk-clip-* openai-gelu apply-layernorm-1p data-parallel-random-init
te-rng-tracker inference-rng-tracker glu-linear-offset
rotary-interleaved train-iters train-samples start-eval-at-iter eval-* skip-train
full-validation multiple-validation-sets validation-set-names iterations-to-skip
"""
_RUNNING = """
exit-* manual-gc manual-gc-interval no-manual-gc-eval disable-manual-gc-eval
no-check-for-nan-in-loss-and-grad check-for-large-grads check-for-spiky-loss
check-weight-hash-across-dp-replicas-interval gpu-sniff-test-interval train-sync-interval
result-rejected-tracker-filename test-mode log-interval log-params-norm log-throughput log-progress
timing-log-* tensorboard-* log-timers-to-tensorboard no-log-loss-scale-to-tensorboard
disable-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
log-memory-interval log-device-memory-used log-num-zeros-in-grad no-barrier-with-level-1-timing
log-world-size-to-tensorboard log-batch-size-to-tensorboard wandb-* logging-level log-energy logits-*
log-straggler straggler-* disable-straggler-on-startup run-workload-inspector-server profile profile-*
use-pytorch-profiler pytorch-profiler-* record-memory-history memory-snapshot-path record-shapes
nvtx-ranges config-logger-dir one-logger-* no-one-logger app-tag-run-* inprocess-* enable-ft-package
calc-ft-timeouts ft-num-warmup-iters error-injection-* enable-msc disable-msc fault-injector-*
flight-recorder-* no-flight-recorder-* disable-flight-recorder-* adlr-autoresume adlr-autoresume-interval
dump-param-to-param-group-map enable-experimental fake-process-group
distributed-timeout-* local-rank local_rank lazy-mpu-init disable-gloo-process-groups no-initialization
use-cpu-initialization init-model-with-meta-device use-mcore-models kill-switch-path tokens-per-expert-*
mtp-loss-scaling-factor mtp-detach-heads
"""
_CHECKPOINTS = """
save save-* load load-* non-persistent-* finetune pretrained-checkpoint ckpt-* no-ckpt-*
use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args persistent-save-interval
disable-use-tokenizer-model-* disable-ckpt-* disable-stream-ckpt-dequant exit-on-missing-checkpoint
auto-detect-ckpt-format async-* use-persistent-ckpt-worker dist-ckpt-* distrib-optim-* replication
replication-* verify-integrity no-stream-ckpt-dequant no-save-* no-load-* override-ckpt-iteration
use-dist-ckpt
"""
_ELSEWHERE = """
inference-* no-inference-* use-legacy-static-engine decode-only-cuda-graphs enable-chunked-prefill
num-speculative-tokens use-same-sampling-seed-across-dp-ranks flash-decode nccl-all-reduce-for-prefill
mlp-chunks-for-prefill max-tokens-to-oom output-bert-embeddings bert-* ict-* biencoder-* titles-data-path
query-in-block-prob use-one-sent-docs evidence-data-path retriever-* block-data-path embedding-path
indexer-* num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction
no-data-sharding head-lr-mult vision-* swin-backbone-type mask-type mask-factor iter-per-epoch dino-*
onnx-safe encoder-seq-length decoder-seq-length
"""

WITHOUT_EFFECT: tuple[str, ...] = tuple(
    " ".join((_DATA, _LEARNING, _RUNNING, _CHECKPOINTS, _ELSEWHERE)).split()
)
"""Flags that change no plan: data, learning, running and logs, checkpoints, what does not train a GPT."""


TABLES: Mapping[str, Iterable[str]] = {
    "refused": REFUSED,
    "companion": COMPANIONS,
    "unmodelled": UNMODELLED,
    "without effect": WITHOUT_EFFECT,
}


def places(name: str) -> tuple[tuple[str, str], ...]:
    """(table, row) of every place of a flag; a row that names it wins over patterns."""
    exact = tuple((table, name) for table, rows in TABLES.items() if name in rows)
    if exact:
        return exact
    return tuple(
        (table, row)
        for table, rows in TABLES.items()
        for row in rows
        if "*" in row or "?" in row
        if fnmatchcase(name, row)
    )
