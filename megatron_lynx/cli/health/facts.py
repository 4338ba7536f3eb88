"""What the checks look at: the job's words, its environment, and the machine; and what they find."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_lynx.cli.health.machine import Machine

_SWITCH = "True"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: the job would ``fail``, or may (``warn``); ``text`` says where and what to do."""

    level: Literal["fail", "warn"]
    text: str


def fail(text: str) -> Finding:
    """The job would fail."""
    return Finding("fail", text)


def warn(text: str) -> Finding:
    """The job may fail, or does other than it seems."""
    return Finding("warn", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A job before its launch.

    ``flags`` are Megatron's, name to words (the last occurrence counts), ``environment`` the variables its
    ranks would see, ``world_size`` how many of them (None: nothing says), ``ranks_per_node`` likewise;
    ``folder`` is where it starts, ``script`` the name of what trains (None: not said).
    """

    flags: Mapping[str, list[str]]
    environment: Mapping[str, str]
    machine: Machine
    world_size: int | None = None
    ranks_per_node: int | None = None
    folder: Path = field(default_factory=Path)
    script: str | None = None

    def has(self, name: str) -> bool:
        """Whether a flag is given."""
        return name in self.flags

    def text(self, name: str) -> str | None:
        """A flag's first word; None without."""
        words = self.flags.get(name)
        return words[0] if words else None

    def number(self, name: str, default: int | None = None) -> int | None:
        """A flag's value; ``default`` where it is not given or no number."""
        text = self.text(name)
        return int(text) if text is not None and text.isdigit() else default

    def size(self, name: str) -> int:
        """A parallel size: 1 where it is not given."""
        return self.number(f"{name}-parallel-size", 1) or 1

    def path(self, name: str) -> Path | None:
        """A flag's value as a path, from where the job starts."""
        text = self.text(name)
        return None if text is None else self.folder / text

    @property
    def gpt(self) -> bool:
        """Whether the job's script is one that trains a GPT, as far as its name says."""
        return self.script is None or "gpt" in self.script

    @property
    def lynx(self) -> bool:
        """Whether the job recomputes with lynx."""
        return self.text("recompute-method") == "lynx"

    @property
    def cpu(self) -> bool:
        """Whether the job asks for the CPU backend."""
        return self.environment.get("MEGATRON_LYNX_CPU") == "1"

    @property
    def transformer_engine(self) -> bool:
        """Whether the job's layers are Transformer Engine's, which is Megatron's default."""
        return (self.text("transformer-impl") or "transformer_engine") == "transformer_engine"

    @property
    def namespace(self) -> Namespace:
        """The flags that decide a split and the weights, as Megatron's validated arguments have them."""
        vpp = self.number("num-virtual-stages-per-pipeline-rank")
        layers, pp = self.number("num-layers"), self.size("pipeline-model")
        per_stage = self.number("num-layers-per-virtual-pipeline-stage")
        if per_stage and layers:
            vpp = max(1, layers // pp // per_stage)
        values = {
            "num_layers": layers,
            "hidden_size": self.number("hidden-size"),
            "num_attention_heads": self.number("num-attention-heads"),
            "ffn_hidden_size": self.number("ffn-hidden-size"),
            "kv_channels": self.number("kv-channels"),
            "tensor_model_parallel_size": self.size("tensor-model"),
            "pipeline_model_parallel_size": pp,
            "pipeline_model_parallel_layout": self.text("pipeline-model-parallel-layout"),
            "virtual_pipeline_model_parallel_size": vpp,
            "decoder_first_pipeline_num_layers": self.number("decoder-first-pipeline-num-layers"),
            "decoder_last_pipeline_num_layers": self.number("decoder-last-pipeline-num-layers"),
            "use_distributed_optimizer": self.has("use-distributed-optimizer"),
            "no_load_optim": self.has("no-load-optim"),
            "finetune": self.has("finetune"),
        }
        return Namespace(**values)


Check = Callable[[Facts], Iterator[Finding]]
"""One kind of fault: what of it the facts show."""
