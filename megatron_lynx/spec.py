"""Model, Parallel and Batch: the job, by Megatron's own names.

Every field is named like Megatron's flag (``num_layers`` is ``--num-layers``), so an error about
a field is an error about a flag. Sizes that follow from others (head width, rows per rank) are
properties, so that they are computed in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from megatron_lynx.errors import ConfigError


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{flag_of(name)} {value!r} must be a whole number of at least 1")


def divides(divisor: int, by: str, total: int, of: str) -> None:
    """Check that the field ``by`` divides the field ``of``.

    Raises:
        ConfigError: it does not.
    """
    if total % divisor:
        works, flag = (total // divisor + 1) * divisor, flag_of(of)
        raise ConfigError(
            f"{flag} {total} is not divisible by {flag_of(by)} {divisor}; {flag} {works} would be"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of a GPT and the kernels that decide what its layers save.

    Sizes are counts of elements. ``transformer_impl`` is the kind of layer (``layers.KINDS``).
    ``attention`` is ``flash`` (the flash-attn package) or ``fused`` (cuDNN's kernels), which save no
    s x s tensors, or ``unfused``. ``masked_softmax_fusion`` is the inverse of
    ``--no-masked-softmax-fusion``, ``fused_activation`` that of ``--no-bias-gelu-fusion`` /
    ``--no-bias-swiglu-fusion``. ``mask_from_data`` says that batches bring the attention mask, so that
    unfused attention does not make one per layer (on middle stages it does all the same).
    ``cross_entropy_fusion_impl`` counts with ``cross_entropy_loss_fusion``. ``dtype_bytes`` is 2 for
    bf16 and fp16, 4 for fp32. ``device`` matters where torch saves other things on a CPU than on CUDA:
    dropout masks and norm statistics in the activation type, and the factors of an RMSNorm. Options of
    Megatron's that change neither what a layer saves nor what it runs (``--apply-layernorm-1p``,
    ``--rotary-interleaved``) have no field. A layer without rotary embedding among others
    (``--no-rope-freq``) counts as one with it, so that all layers are the same.

    Raises:
        ConfigError: a size below 1 or one that does not divide.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    swiglu: bool = False
    squared_relu: bool = False
    quick_geglu: bool = False
    activation_func_clamp_value: float | None = None
    use_te_activation_func: bool = False
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    rotary_percent: float = 1.0
    apply_rope_fusion: bool | None = None
    """Whether a kernel of Transformer Engine rotates; where it is not said, as the kind of layer has it."""
    qk_layernorm: bool = False
    attention_output_gate: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    max_position_embeddings: int | None = None
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    add_bias_linear: bool = True
    untie_embeddings_and_output_weights: bool = False
    mtp_num_layers: int = 0
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    attention: Literal["flash", "fused", "unfused"] = "flash"
    attention_softmax_in_fp32: bool = False
    masked_softmax_fusion: bool = True
    mask_from_data: bool = False
    fused_activation: bool = True
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    dtype_bytes: int = 2
    device: Literal["cuda", "cpu"] = "cuda"
    transformer_impl: str = "transformer_engine"
    name: str = "custom"

    def __post_init__(self) -> None:
        _positive(self, "num_layers", "hidden_size", "num_attention_heads", "vocab_size")
        for optional in ("num_query_groups", "kv_channels", "ffn_hidden_size"):
            if getattr(self, optional) is not None:
                _positive(self, optional)
        if self.kv_channels is None:
            divides(self.num_attention_heads, "num_attention_heads", self.hidden_size, "hidden_size")
        divides(self.groups, "num_query_groups", self.num_attention_heads, "num_attention_heads")
        if self.swiglu + self.squared_relu + self.quick_geglu > 1:
            raise ConfigError("--swiglu, --squared-relu and --quick-geglu exclude each other; --swiglu works")
        if self.mtp_num_layers < 0:
            raise ConfigError(f"--mtp-num-layers {self.mtp_num_layers} must be at least 0; 1 works")
        if not 0.0 < self.rotary_percent <= 1.0:
            raise ConfigError(
                f"--rotary-percent {self.rotary_percent} must be above 0 and at most 1; 1.0 works"
            )
        for name in ("attention_dropout", "hidden_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(
                    f"{flag_of(name)} {getattr(self, name)} must be at least 0 and below 1; "
                    f"{flag_of(name)} 0.1 works"
                )

    @property
    def gated(self) -> bool:
        """Whether the MLP's activation multiplies two halves of fc1's output."""
        return self.swiglu or self.quick_geglu

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def mask_bytes(self) -> int:
        """Size of one element of a dropout mask: one byte on CUDA, the activation type on a CPU."""
        return 1 if self.device == "cuda" else self.dtype_bytes

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: scale and shift, or the scale alone."""
        return self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)

    @property
    def groups(self) -> int:
        """Key/value heads of the whole model: the heads themselves without GQA."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn(self) -> int:
        """Width of the MLP; Megatron's defaults are 4h, and 8h/3 rounded to 64 with SwiGLU."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Parallel sizes: tensor, pipeline, virtual pipeline (chunks per rank), data and context.

    Raises:
        ConfigError: a size below 1, or VPP without PP.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    sequence_parallel: bool = False
    microbatch_group_size: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "tp", "pp", "vpp", "dp", "cp")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"--vpp {self.vpp} needs a pipeline; --vpp 1 works with --pp 1")
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError("--sequence-parallel needs tensor parallelism; --tp 2 works, or leave it out")
        if self.microbatch_group_size is not None and self.microbatch_group_size < self.pp:
            raise ConfigError(
                "--microbatch-group-size-per-virtual-pipeline-stage "
                f"{self.microbatch_group_size} is below --pp {self.pp}; {self.pp} works"
            )

    def tokens(self, batch: Batch) -> int:
        """Tokens of one microbatch on one context-parallel rank."""
        return batch.seq_length * batch.micro_batch_size // self.cp

    @property
    def group_size(self) -> int:
        """Microbatches that one chunk runs before the next one takes over (VPP)."""
        return self.microbatch_group_size or self.pp


Dtype = Literal["fp32", "fp16", "bf16", "fp8"]

_DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """How gradients and the state of Adam are kept, by the names of Megatron's flags, as its
    ``validate_args`` leaves them: ``accumulate_allreduce_grads_in_fp32`` is set for bf16 unless
    ``--grad-reduce-in-bf16`` or ``--main-grads-dtype bf16`` is given, and not for fp16.

    The four types count only with ``use_precision_aware_optimizer``.
    ``optimizer_offload_fraction`` of the state is in host memory with ``optimizer_cpu_offload``.

    Raises:
        ConfigError: a number of instances below 1, or a fraction outside of 0 to 1.
    """

    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    use_precision_aware_optimizer: bool = False
    main_params_dtype: Dtype = "fp32"
    exp_avg_dtype: Dtype = "fp32"
    exp_avg_sq_dtype: Dtype = "fp32"
    accumulate_allreduce_grads_in_fp32: bool = True
    gradient_accumulation_fusion: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "num_distributed_optimizer_instances")
        if not 0.0 <= self.optimizer_offload_fraction <= 1.0:
            raise ConfigError(
                f"--optimizer-offload-fraction {self.optimizer_offload_fraction} must be between 0 and 1; "
                "1.0 works"
            )

    def gradient_bytes(self, model: Model) -> int:
        """Size of one element of the gradient buffers."""
        return 4 if self.accumulate_allreduce_grads_in_fp32 else model.dtype_bytes

    def main_param_bytes(self, model: Model) -> int:
        """Size of what Adam keeps of one 16-bit parameter: a copy in fp32, or with the precision-aware
        optimizer the 16 bits that the parameter lacks (``store_param_remainders``)."""
        if model.dtype_bytes == 4:
            return 0
        return 2 if self.use_precision_aware_optimizer else 4

    @property
    def state_bytes(self) -> int:
        """Size of Adam's two moments of one parameter."""
        if not self.use_precision_aware_optimizer:
            return 8
        return _DTYPE_BYTES[self.exp_avg_dtype] + _DTYPE_BYTES[self.exp_avg_sq_dtype]

    @property
    def on_device(self) -> float:
        """The share of the optimizer's state that is in device memory."""
        return 1.0 - self.optimizer_offload_fraction if self.optimizer_cpu_offload else 1.0

    def shards(self, dp: int) -> int:
        """Ranks among which the optimizer's state is split."""
        return max(1, dp // self.num_distributed_optimizer_instances) if self.use_distributed_optimizer else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequence length and batch sizes.

    Raises:
        ConfigError: a size below 1.
    """

    seq_length: int
    micro_batch_size: int
    global_batch_size: int

    def __post_init__(self) -> None:
        _positive(self, "seq_length", "micro_batch_size", "global_batch_size")

    def num_microbatches(self, dp: int) -> int:
        """Microbatches that each pipeline runs in a step."""
        return self.global_batch_size // (self.micro_batch_size * dp)


Facts = Mapping[str, int | str | bool]
"""What a plan or a profile was made for, by the names of fields and flags."""

_ENDS = (
    *("name", "vocab_size", "max_position_embeddings", "untie_embeddings_and_output_weights"),
    "mtp_num_layers",
)
"""Fields of a model that change no layer: what is above and below them."""

_FLAGS = {
    "mask_from_data": "--create-attention-mask-in-dataloader",
    "fused_activation": "fused activation (--no-bias-gelu-fusion, --no-bias-swiglu-fusion)",
    "attention": "attention (--attention-backend)",
    "add_bias_linear": "biases (--disable-bias-linear)",
    "dtype_bytes": "bytes of a number (--bf16)",
    "device": "device",
}


def layer_facts(model: Model, parallel: Parallel, batch: Batch) -> Facts:
    """What decides what one layer saves on one rank, resolved: a default and the same value given are
    one, a dropout counts by whether there is one, and what the attention kernel has no use for is out."""
    facts = {k: v for k, v in asdict(model).items() if k not in (*_ENDS, "num_layers")}
    facts |= {"num_query_groups": model.groups, "kv_channels": model.head_size, "ffn_hidden_size": model.ffn}
    # As Megatron has it after validation, whatever was given.
    fuses = model.apply_rope_fusion
    by_default = model.transformer_impl == "transformer_engine" and model.position_embedding_type == "rope"
    facts["apply_rope_fusion"] = model.rotary and (by_default if fuses is None else fuses)
    for name in ("attention_dropout", "hidden_dropout"):
        facts[name] = facts[name] > 0
    if model.attention == "flash":
        del facts["mask_from_data"], facts["attention_softmax_in_fp32"]
    return {
        **facts,
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.sequence_parallel,
        **(
            {"context_parallel_size": parallel.cp, "cp_comm_type": parallel.cp_comm_type}
            if parallel.cp > 1
            else {}
        ),
        "seq_length": batch.seq_length,
        "micro_batch_size": batch.micro_batch_size,
    }


def job_facts(model: Model, parallel: Parallel, batch: Batch) -> Facts:
    """What a plan is made for: the facts of a layer, and how many there are on which stages.

    The data-parallel size, the global batch and the memory budget stay out: a plan made for 32 GiB is
    right on a device that offers 31.7 or 80.
    """
    return {
        **layer_facts(model, parallel, batch),
        "num_layers": model.num_layers,
        "pipeline_model_parallel_size": parallel.pp,
        "num_virtual_stages_per_pipeline_rank": parallel.vpp,
        **(
            {"microbatch_group_size_per_virtual_pipeline_stage": parallel.group_size}
            if parallel.vpp > 1
            else {}
        ),
    }


def differing(made_for: Facts, own: Facts) -> str:
    """The facts that differ, by flag: what something was made for, and this job's."""
    names = [name for name in {**made_for, **own} if made_for.get(name) != own.get(name)]
    told = [
        f"{_FLAGS.get(name, flag_of(name))} {_said(made_for, name)}, this job has {_said(own, name)}"
        for name in names
    ]
    return "; ".join(told)


def _said(facts: Facts, name: str) -> str:
    value = facts.get(name, "none")
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
