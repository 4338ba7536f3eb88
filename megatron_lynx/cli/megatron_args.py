"""``--from-args FILE``: the job that a Megatron launch script or argument list describes.

Each flag is honoured (it becomes a field of the job), refused (the job is of a kind that lynx does
not plan) or ignored (it changes no plan); the ignored ones are named. Flags and defaults are those
of Megatron's ``training/arguments.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lynx.cli.shell import Script, read_script, words_of
from megatron_lynx.errors import ConfigError

_INT = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "num-attention-heads": "num_attention_heads",
    "kv-channels": "kv_channels",
    "ffn-hidden-size": "ffn_hidden_size",
    "max-position-embeddings": "max_position_embeddings",
    "vocab-size": "vocab_size",
    "padded-vocab-size": "vocab_size",
    "num-query-groups": "num_query_groups",
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "vpp",
    "num-layers-per-virtual-pipeline-stage": "layers_per_virtual_stage",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size",
    "decoder-first-pipeline-num-layers": "first_stage_layers",
    "decoder-last-pipeline-num-layers": "last_stage_layers",
    "seq-length": "seq_length",
    "micro-batch-size": "micro_batch_size",
    "global-batch-size": "global_batch_size",
}
_FLOAT = {"attention-dropout": "attention_dropout", "hidden-dropout": "hidden_dropout"}
_TEXT = {
    "position-embedding-type": "position_embedding_type",
    "normalization": "normalization",
    "pipeline-model-parallel-layout": "layout",
    "recompute-granularity": "recompute_granularity",
}
_SWITCH: Mapping[str, tuple[str, Any]] = {
    "swiglu": ("swiglu", True),
    "disable-bias-linear": ("add_bias_linear", False),
    "untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", True),
    "attention-softmax-in-fp32": ("attention_softmax_in_fp32", True),
    "sequence-parallel": ("sequence_parallel", True),
    "use-distributed-optimizer": ("distributed_optimizer", True),
    "use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "no-bias-gelu-fusion": ("no_gelu_fusion", True),
    "no-bias-swiglu-fusion": ("no_swiglu_fusion", True),
    "group-query-attention": ("group_query_attention", True),
    "bf16": ("dtype_bytes", 2),
    "fp16": ("dtype_bytes", 2),
}
_REFUSED: Mapping[str, str] = {
    "num-experts": "a mixture of experts is not planned; leave it out for a dense model",
    "multi-latent-attention": "multi-latent attention is not planned; leave it out",
    "fp8-format": "fp8 is not planned; --bf16 works",
    "fp8": "fp8 is not planned; --bf16 works",
    "fp4-format": "fp4 is not planned; --bf16 works",
    "mtp-num-layers": "multi-token prediction is not planned; leave it out",
    "squared-relu": "squared ReLU is not planned; --swiglu works, or GELU without a flag",
    "quick-geglu": "quick GEGLU is not planned; --swiglu works, or GELU without a flag",
    "hybrid-layer-pattern": "a hybrid model is not planned; --num-layers works",
    "use-megatron-fsdp": "FSDP is not planned; --use-distributed-optimizer works",
    "use-torch-fsdp2": "FSDP is not planned; --use-distributed-optimizer works",
}
_VOCABULARY = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 32000,
}
_LAUNCHER = frozenset(
    {
        *("nproc_per_node", "nproc-per-node", "nnodes", "node_rank", "node-rank"),
        *("master_addr", "master-addr", "master_port", "master-port"),
        *("rdzv_id", "rdzv-id", "rdzv_backend", "rdzv-backend", "rdzv_endpoint", "rdzv-endpoint"),
    }
)


@dataclass(slots=True, kw_only=True)
class MegatronArgs:
    """What a script says.

    ``values`` are fields of the job by name; ``world_size`` is that of the launcher, if it says;
    ``ignored`` the flags that change no plan; ``notes`` what was assumed.
    """

    values: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_args(path: str, environment: Mapping[str, str] | None = None) -> MegatronArgs:
    """Read a launch script or an argument list.

    Raises:
        ConfigError: unreadable, without Megatron flags, with a flag whose value does not work, or
            of a kind of job that lynx does not plan.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-args {path!r} cannot be read ({error}); a launch script works") from error
    script = read_script(text, os.environ if environment is None else environment)
    return parse_words(_pick(script, path), path, unset=script.unset)


def _pick(script: Script, path: str) -> list[str]:
    """The words of the statement that trains: the last one with the most flags that are known.

    Statements that begin with a flag belong together: a bare list of arguments.
    """
    known = {*_INT, *_FLOAT, *_TEXT, *_SWITCH}
    bare = [word for command in script.commands if command[0].startswith("-") for word in command]
    candidates = [words_of(command) for command in script.commands if not command[0].startswith("-")]
    candidates.append(bare)

    def score(words: Sequence[str]) -> int:
        return sum(word.removeprefix("--").split("=")[0] in known for word in words if word[:2] == "--")

    best = max(reversed(candidates), key=score)
    if score(best) == 0:
        raise ConfigError(
            f"--from-args {path!r} holds no flag of Megatron; a script with --num-layers 24 does"
        )
    return best


def parse_words(words: Sequence[str], path: str, unset: set[str] | None = None) -> MegatronArgs:
    """Sort the flags in ``words`` into honoured, refused and ignored ones."""
    flags = _flags(words)
    found = MegatronArgs()
    values, ignored = found.values, []
    for name, given in flags.items():
        if name in _INT:
            values[_INT[name]] = _one(name, given, int, "24", unset)
        elif name in _FLOAT:
            values[_FLOAT[name]] = _one(name, given, float, "0.1", unset)
        elif name in _TEXT:
            values[_TEXT[name]] = _one(name, given, str, "rope", unset)
        elif name in _SWITCH:
            key, value = _SWITCH[name]
            values[key] = value
        elif name in _REFUSED:
            raise ConfigError(f"--{name} {' '.join(given)}: {_REFUSED[name]}")
        elif name == "context-parallel-size":
            if _one(name, given, int, "1", unset) > 1:
                raise ConfigError(f"--{name} {given[0]} is not planned; --{name} 1 works")
        elif name not in _LAUNCHER and name not in _ATTENTION_FLAGS and name != "tokenizer-type":
            ignored.append(f"--{name}")
    found.world_size = _world_size(flags)
    found.ignored = tuple(ignored)
    found.notes = _complete(values, flags)
    return found


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    """Flag name -> the words up to the next flag; the last occurrence counts."""
    flags: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = [value] if equals else []
            flags[name] = current
        else:
            current.append(word)
    return flags


def _one(
    name: str, given: Sequence[str], read: Callable[[str], Any], example: str, unset: set[str] | None
) -> Any:
    """The single value of a flag."""
    if not given:
        why = f" (unset in the script: {', '.join(sorted(unset))})" if unset else ""
        raise ConfigError(f"--{name} has no value{why}; --{name} {example} works")
    try:
        return read(given[0])
    except ValueError as error:
        raise ConfigError(f"--{name} {given[0]!r} is not a number; --{name} {example} works") from error


def _world_size(flags: Mapping[str, list[str]]) -> int | None:
    """Processes that the launcher starts, where it says so in numbers."""
    sizes = []
    for name in ("nproc_per_node", "nproc-per-node", "nnodes"):
        word = (flags.get(name) or [""])[0].split(":")[-1]
        if word.isdigit():
            sizes.append(int(word))
        elif name in flags:
            return None
    if not any(name.startswith("nproc") for name in flags):
        return None
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


_ATTENTION_FLAGS = ("use-flash-attn", "attention-backend", "transformer-impl")


def _complete(values: dict[str, Any], flags: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Fill in what Megatron derives or defaults to; returns what had to be assumed."""
    notes = []
    if not values.pop("group_query_attention", False):
        values.pop("num_query_groups", None)
    elif "num_query_groups" not in values:
        values["num_query_groups"] = 1
    unfused = {key: values.pop(key, False) for key in ("no_swiglu_fusion", "no_gelu_fusion")}
    if unfused["no_swiglu_fusion" if values.get("swiglu") else "no_gelu_fusion"]:
        values["fused_activation"] = False
    values.setdefault("dtype_bytes", 4)
    backend = (flags.get("attention-backend") or ["auto"])[0]
    local = (flags.get("transformer-impl") or ["transformer_engine"])[0] == "local"
    values["attention"] = "unfused" if local or backend in ("unfused", "local") else "flash"
    if "vocab_size" not in values:
        kind = (flags.get("tokenizer-type") or ["an unnamed tokenizer"])[0]
        values["vocab_size"] = _VOCABULARY.get(kind, 51200)
        notes.append(f"vocabulary of {kind} taken as {values['vocab_size']}; --vocab-size sets it")
    granularity = values.pop("recompute_granularity", None)
    if granularity:
        notes.append(f"--recompute-granularity {granularity} is one of the methods that are compared")
    return tuple(notes)
