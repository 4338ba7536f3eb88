"""NeMo's YAML of a GPT (``trainer:`` and ``model:``) as the command that Megatron would train it with.

What has another name in Megatron is renamed, the rest is passed on by its own name, so that what is not known
is named like any unknown flag. Recipes that are Python code are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_lynx.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "encoder_seq_length": "seq-length",
    "rotary_percentage": "rotary-percent",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "activations_checkpoint_granularity": "recompute-granularity",
    "activations_checkpoint_method": "recompute-method",
    "activations_checkpoint_num_layers": "recompute-num-layers",
    "layernorm_epsilon": "norm-epsilon",
    "num_moe_experts": "num-experts",
    "grad_allreduce_chunk_size_mb": "ddp-bucket-size",
}
"""Field of NeMo's ``model`` -> Megatron's flag."""

SWITCHES: Mapping[str, tuple[bool, tuple[str, ...]]] = {
    "bias": (False, ("--disable-bias-linear",)),
    "share_embeddings_and_output_weights": (False, ("--untie-embeddings-and-output-weights",)),
    "transformer_engine": (False, ("--transformer-impl", "local")),
    "masked_softmax_fusion": (False, ("--no-masked-softmax-fusion",)),
    "bias_activation_fusion": (False, ("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion")),
    "gradient_accumulation_fusion": (False, ("--no-gradient-accumulation-fusion",)),
    "apply_rope_fusion": (False, ("--no-rope-fusion",)),
    "apply_query_key_layer_scaling": (True, ("--apply-query-key-layer-scaling",)),
    "sequence_parallel": (True, ("--sequence-parallel",)),
    "fp8": (True, ("--fp8-format", "hybrid")),
}
"""Field -> the value that says something, and the words that say it to Megatron."""

ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "gelu": (),
    "swiglu": ("--swiglu", "--no-bias-swiglu-fusion"),
    "fast-swiglu": ("--swiglu",),
    "squared-relu": ("--squared-relu",),
}
NORMS: Mapping[str, tuple[str, ...]] = {
    "layernorm": (),
    "layernorm1p": ("--apply-layernorm-1p",),
    "rmsnorm": ("--normalization", "RMSNorm"),
}
PRECISIONS: Mapping[str, tuple[str, ...]] = {"bf16": ("--bf16",), "16": ("--fp16",), "32": ()}

CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "model.activation": ACTIVATIONS,
    "model.normalization": NORMS,
    "trainer.precision": PRECISIONS,
}
"""Fields with names for values: the words for each."""

_HARMLESS = frozenset({"megatron_amp_O2", "hidden_act", "name", "restore_from_path", "seed"})
"""Settings of NeMo itself that change no plan."""

_OTHER = re.compile(r"\$\{(?:\.|model\.)(\w+)\}")


def is_nemo(data: Mapping[str, Any]) -> bool:
    """Whether YAML is NeMo's."""
    return isinstance(data.get("model"), Mapping) and isinstance(data.get("trainer"), Mapping)


def nemo_words(data: Mapping[str, Any], flag: str) -> list[str]:
    """The command that trains what NeMo's YAML describes.

    Raises:
        ConfigError: a value that is computed, or one that Megatron has no word for; names the setting.
    """
    trainer = data["trainer"]
    model = {name: value for name, value in data["model"].items() if not isinstance(value, Mapping)}
    words = ["torchrun"]
    for name, said in (("num_nodes", "--nnodes"), ("devices", "--nproc-per-node")):
        words += [said, str(trainer[name])] if trainer.get(name) is not None else []
    words += ["pretrain_gpt.py", *_chosen("trainer.precision", trainer.get("precision"), flag)]
    for name, value in model.items():
        words += _words(name, _value(name, value, model, flag), flag)
    optimizer = data["model"].get("optim") or {}
    if "distributed" in str(optimizer.get("name", "")):
        words.append("--use-distributed-optimizer")
    if model.get("num_query_groups") is not None:
        words.append("--group-query-attention")
    return words


def _value(name: str, value: Any, model: Mapping[str, Any], flag: str) -> Any:
    """A value, or the one that it refers to."""
    other = _OTHER.fullmatch(str(value))
    if other is not None and other[1] in model and other[1] != name:
        return _value(other[1], model[other[1]], model, flag)
    if "${" in str(value):
        raise ConfigError(f"{flag}: {name}: {value} is computed by NeMo; a number works")
    return value


def _words(name: str, value: Any, flag: str) -> list[str]:
    if name in SWITCHES:
        when, said = SWITCHES[name]
        return list(said) if value is when else []
    if f"model.{name}" in CHOICES:
        return _chosen(f"model.{name}", value, flag)
    if value is None or value is False or name in _HARMLESS:
        return []
    said_as = f"--{RENAMED.get(name, name.replace('_', '-'))}"
    if value is True:
        return [said_as]
    return [said_as, *map(str, value)] if isinstance(value, list) else [said_as, str(value)]


def _chosen(name: str, value: Any, flag: str) -> list[str]:
    """The words for one of several names."""
    if value is None:
        return []
    text = str(value).removesuffix("-mixed").removesuffix("-true")
    table = CHOICES[name]
    if text not in table:
        raise ConfigError(f"{flag}: {name}: {value} is not planned; {next(iter(table))} works")
    return list(table[text])
