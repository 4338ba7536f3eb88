"""Models of which only some weights train: ways to freeze a GPT, by name."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

FIRST = 2
"""How many layers are frozen where the first ones are."""
RANK = 2


def freeze(model: Any, what: str) -> None:
    """Freeze what ``what`` names.

    ``embedding``: it and the output layer; ``first``: that and the first layers; ``linears``: every matrix of
    the layers, so that norms and biases train; ``adapters``: everything but adapters (LoRA) that are put into
    two linears of each layer.
    """
    for name, parameter in model.named_parameters():
        ends = name.startswith(("embedding.", "output_layer."))
        parameter.requires_grad_(
            {
                "embedding": not ends,
                "first": not ends,
                "linears": ends or parameter.dim() < 2,
                "adapters": False,
            }[what]
        )
    for layer in model.decoder.layers:
        if what == "first" and layer.layer_number <= FIRST:
            layer.requires_grad_(False)
        if what == "adapters":
            layer.self_attention.linear_qkv = LoRALinear(layer.self_attention.linear_qkv, model.config)
            layer.mlp.linear_fc1 = LoRALinear(layer.mlp.linear_fc1, model.config)


class LoRALinear(torch.nn.Module):
    """A frozen linear that is split by column, and a product of two narrow matrices beside it."""

    def __init__(self, linear: Any, config: Any) -> None:
        super().__init__()
        self.to_wrap = linear
        self._sequence_parallel = config.sequence_parallel
        outputs, inputs = linear.weight.shape
        draws = torch.Generator().manual_seed(outputs)
        first = torch.randn(RANK, inputs, generator=draws) * 0.1
        second = torch.randn(outputs, RANK, generator=draws) * 0.1
        self.first = torch.nn.Parameter(first.to(linear.weight))
        self.second = torch.nn.Parameter(second.to(linear.weight))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What the linear gives and what the adapter does, and the linear's bias."""
        out, bias = self.to_wrap(hidden)
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        narrow = torch.nn.functional.dropout(hidden, 0.1, self.training) @ self.first.t()
        return out + narrow @ self.second.t(), bias

    def backward_dw(self) -> None:
        """Megatron asks it of its linears."""
