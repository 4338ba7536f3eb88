"""YAML configs as arguments: ``MODEL_ARGS`` of Megatron's functional tests, ``--yaml-cfg``, and NeMo's.

A small, strict part of YAML: mappings by indentation, scalars, lists, blocks of text. Anchors and other
things are refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lynx.cli.launch.nemo import is_nemo, nemo_words
from megatron_lynx.errors import ConfigError

INVERSE: Mapping[str, str] = {
    "add_bias_linear": "disable-bias-linear",
    "bias_gelu_fusion": "no-bias-gelu-fusion",
    "bias_swiglu_fusion": "no-bias-swiglu-fusion",
    "bias_dropout_fusion": "no-bias-dropout-fusion",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "apply_rope_fusion": "no-rope-fusion",
    "create_attention_mask_in_dataloader": "no-create-attention-mask-in-dataloader",
    "persist_layer_norm": "no-persist-layer-norm",
}
"""Field of Megatron's config -> the flag that turns it off."""

RENAMED: Mapping[str, str] = {
    "gated_linear_unit": "swiglu",
    "cpu_offloading": "cpu-offloading",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "layernorm_epsilon": "norm-epsilon",
    "num_moe_experts": "num-experts",
}
"""Field of Megatron's config -> its flag, where the two have other names."""

_KEY = re.compile(r"""(?P<key>"[^"]*"|'[^']*'|[^\s:#&*!|>{}\[\],][^:#]*?)\s*:(?:\s+(?P<value>.*))?$""")


def yaml_words(text: str, flag: str) -> list[str]:
    """The arguments that a YAML config stands for.

    Raises:
        ConfigError: it is more YAML than this reads; names the line.
    """
    data = _mapping(list(_lines(text, flag)), flag)
    if isinstance(data.get("MODEL_ARGS"), Mapping):
        return [word for key, value in data["MODEL_ARGS"].items() for word in _flag(key, value)]
    if is_nemo(data):
        return nemo_words(data, flag)
    return [word for key, value in _leaves(data) for word in _flag(key, value)]


def _leaves(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield key, value


def _flag(key: str, value: Any) -> list[str]:
    """The words of one setting; none where it is off."""
    name = key.removeprefix("--")
    field = name.replace("-", "_")
    if field in INVERSE and not key.startswith("--"):
        return [] if value in (True, None) else [f"--{INVERSE[field]}"]
    flag = f"--{RENAMED.get(field, name if key.startswith('--') else field.replace('_', '-'))}"
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    return [flag, *map(str, value)] if isinstance(value, list) else [flag, str(value)]


def _lines(text: str, flag: str) -> Iterator[tuple[int, int, str]]:
    """(number, indentation, text) of each line that says something; blocks of text (``|``) are left out."""
    block: int | None = None
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        indent = len(line) - len(line.lstrip(" "))
        stripped = (
            re.sub(r"(^|\s)#.*$", "", line).strip() if "'" not in line and '"' not in line else line.strip()
        )
        if block is not None and (not line.strip() or indent > block):
            continue
        block = None
        if not stripped or stripped.startswith("#") or stripped == "---":
            continue
        if (
            line.startswith("\t")
            or stripped[0] in "{&*!?"
            or re.search(r":\s+[&*{!]", stripped)
            or "<<:" in stripped
        ):
            raise ConfigError(
                f"{flag}, line {number}: {stripped[:60]!r} is more YAML than is read here; "
                "plain mappings and lists work"
            )
        if re.search(r":\s*[|>][-+]?$", stripped):
            block = indent
            stripped = stripped.rstrip("|>-+")
        yield number, indent, stripped


def _mapping(lines: list[tuple[int, int, str]], flag: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    i = 0
    while i < len(lines):
        number, indent, text = lines[i]
        match = _KEY.fullmatch(text)
        if match is None:
            raise ConfigError(f"{flag}, line {number}: {text[:60]!r} is no `key: value`; num_layers: 24 is")
        inner = []
        i += 1
        while i < len(lines) and (lines[i][1] > indent or (lines[i][1] == indent and lines[i][2][:1] == "-")):
            if lines[i][2].startswith("--") and lines[i][1] == indent:
                break
            inner.append(lines[i])
            i += 1
        key = match["key"].strip("\"'")
        if match["value"]:
            found[key] = _scalar(match["value"].strip())
        elif inner and inner[0][2].startswith("- "):
            found[key] = [_scalar(item[2][2:].strip()) for item in inner]
        else:
            found[key] = _mapping(inner, flag) if inner else None
    return found


def _scalar(text: str) -> Any:
    """A value: true and false, none, a quoted or plain string (numbers stay text), a list in brackets."""
    if text[0] in "\"'":
        return text[1 : text.rfind(text[0])]
    if text.startswith("[") and text.endswith("]"):
        return [_scalar(part.strip()) for part in text[1:-1].split(",") if part.strip()]
    known = {"true": True, "false": False, "yes": True, "no": False, "null": None, "none": None, "~": None}
    return known.get(text.lower(), text)
