"""Binds an executor to the layers of a model: which submodule is which region.

The layer's own code stays as it is. Its submodules' ``forward`` is replaced on the instance, below
module hooks, so that a hook of the user's runs once per forward pass and never for a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lynx.errors import ConfigError
from megatron_lynx.runtime.executor import Executor

REGION_OF = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "linear_qkv",
    "self_attention.core_attention": "core_attention",
    "self_attention.linear_proj": "linear_proj",
    "pre_mlp_layernorm": "pre_mlp_layernorm",
    "mlp.linear_fc1": "linear_fc1",
    "mlp.linear_fc2": "linear_fc2",
}
"""Submodules that are regions. The glue between them and the two bias-dropout-adds complete
``gpt.FORWARD_ORDER``; a test walks a real layer and compares."""

BIAS_DROPOUT_ADDS = ("self_attn_bda", "mlp_bda")
PARENTS = ("self_attention", "mlp")


def transformer_layers(chunks: Sequence[Any]) -> list[list[Any]]:
    """The transformer layers of each model chunk, in order."""
    return [[m for m in chunk.modules() if isinstance(m, TransformerLayer)] for chunk in chunks]


def check_layer(layer: Any) -> None:
    """Refuse a layer that is not a plain dense decoder layer of Megatron's local spec.

    Raises:
        ConfigError: says what it has instead.
    """
    where = f"layer {layer.layer_number - 1}"
    if type(layer.self_attention) is not SelfAttention or type(layer.mlp) is not MLP:
        raise ConfigError(
            f"--recompute-method lynx: {where} has {type(layer.self_attention).__name__} and "
            f"{type(layer.mlp).__name__}; it supports SelfAttention with a dense MLP"
        )
    if not isinstance(layer.cross_attention, (IdentityOp, IdentityFuncOp)):
        raise ConfigError(f"--recompute-method lynx: {where} has cross attention; decoders work")
    for norm in ("input_layernorm", "pre_mlp_layernorm"):
        if isinstance(getattr(layer, norm), IdentityOp):
            raise ConfigError(
                f"--recompute-method lynx: {norm} of {where} is fused into the linear after it; "
                "--transformer-impl local works"
            )
    for name in ("q_layernorm", "k_layernorm"):
        if not isinstance(getattr(layer.self_attention, name, None), (IdentityOp, type(None))):
            raise ConfigError(f"--recompute-method lynx does not support --qk-layernorm ({where})")
    frozen = [n for n, p in layer.named_parameters() if not p.requires_grad]
    if frozen:
        raise ConfigError(f"--recompute-method lynx: {frozen[0]} of {where} is frozen; train all weights")


def bind(chunks: Sequence[Any], executor: Executor) -> Callable[[], None]:
    """Wrap every transformer layer; returns the function that takes the wraps off again.

    Raises:
        ConfigError: a layer is not supported, or the layers are not those of the plan.
    """
    by_chunk = transformer_layers(chunks)
    indices = tuple(tuple(layer.layer_number - 1 for layer in layers) for layers in by_chunk)
    if indices != executor.plan.chunks:
        raise ConfigError(
            f"--lynx-plan gives stage {executor.plan.stage} the layers {executor.plan.chunks}, the model "
            f"has {indices}; pass --pipeline-model-parallel-layout as the plan's second line says"
        )
    for layers in by_chunk:
        for layer in layers:
            check_layer(layer)
    undos: list[Callable[[], None]] = []
    for layers in by_chunk:
        for layer in layers:
            undos += _wrap_layer(layer, executor)

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def _wrap_layer(layer: Any, executor: Executor) -> list[Callable[[], None]]:
    index, forward = layer.layer_number - 1, layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return forward(*args, **kwargs)
        return executor.run_layer(index, forward, args, kwargs)

    undos = [_set(layer, "forward", run)]
    for parent in PARENTS:
        module = layer.get_submodule(parent)
        undos.append(_set(module, "forward", _parent(parent, module.forward, executor)))
    for path, region in REGION_OF.items():
        module = layer.get_submodule(path)
        undos.append(_set(module, "forward", _region(region, module.forward, executor)))
    for name in BIAS_DROPOUT_ADDS:
        undos.append(_set(layer, name, _bias_dropout_add(name, getattr(layer, name), executor)))
    return undos


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Shadow an attribute on the instance; returns the function that uncovers it."""
    shadowed = owner.__dict__.get(name)
    object.__setattr__(owner, name, value)

    def undo() -> None:
        if shadowed is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, shadowed)

    return undo


def _parent(name: str, forward: Callable[..., Any], executor: Executor) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        active = executor.active
        return forward(*args, **kwargs) if active is None else active.parent(name, forward, args, kwargs)

    return run


def _region(name: str, forward: Callable[..., Any], executor: Executor) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        active = executor.active
        return forward(*args, **kwargs) if active is None else active.record(name, forward, args, kwargs)

    return run


def _bias_dropout_add(name: str, factory: Callable[..., Any], executor: Executor) -> Callable[..., Any]:
    """``layer.self_attn_bda`` is a factory: called with (training, fused) it returns the operation."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return _region(name, factory(*args, **kwargs), executor)

    return make
