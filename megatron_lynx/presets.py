"""Models, clusters and runs by name: the TOML files under ``configs``, or a file of the user's own.

The files lie inside the package (``megatron_lynx/configs``), so that a checkout and an installed
wheel find the same ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from megatron_lynx.errors import ConfigError
from megatron_lynx.hardware import MEASURE, Cluster, read_cluster
from megatron_lynx.spec import Model

Kind = Literal["models", "clusters", "runs"]

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "attention": ("flash", "fused", "unfused"),
    "cross_entropy_fusion_impl": ("native", "te"),
    "device": ("cuda", "cpu"),
}


def preset_names(kind: Kind) -> tuple[str, ...]:
    """Names that ``--model``, ``--cluster`` or ``--run`` take, sorted."""
    folder = files("megatron_lynx") / "configs" / kind
    return tuple(sorted(f.name[: -len(".toml")] for f in folder.iterdir() if f.name.endswith(".toml")))


def usable_names(kind: Kind) -> tuple[str, ...]:
    """The names that work as they stand: not those with figures that their user has to measure."""
    folder = files("megatron_lynx") / "configs" / kind
    texts = {name: (folder / f"{name}.toml").read_text("utf-8") for name in preset_names(kind)}
    return tuple(name for name, text in texts.items() if f'"{MEASURE}"' not in text)


def read_toml(kind: Kind, name: str) -> tuple[dict[str, Any], str]:
    """The contents of preset ``name``, or of the file called so, and what to call it in errors.

    Raises:
        ConfigError: neither a preset nor a file, or not TOML.
    """
    flag = f"--{kind[:-1]}"
    if name in preset_names(kind):
        text = (files("megatron_lynx") / "configs" / kind / f"{name}.toml").read_text("utf-8")
    elif name.endswith(".toml") or "/" in name:
        try:
            text = Path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{flag} {name!r} cannot be read ({error}); {_known(kind)}") from error
    else:
        raise ConfigError(f"{flag} {name!r} is unknown; {_known(kind)}")
    try:
        return tomllib.loads(text), f"{flag} {name}"
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{flag} {name!r} is not TOML: {error}; {_known(kind)}") from error


def _known(kind: Kind) -> str:
    return f"one of {', '.join(usable_names(kind))} works, or the path of a .toml file"


def load_cluster(name: str) -> Cluster:
    """A cluster by preset name or file.

    Raises:
        ConfigError: unknown, malformed, or with figures that its user has to measure.
    """
    data, where = read_toml("clusters", name)
    return read_cluster(data, where)


def load_model(name: str, **overrides: Any) -> Model:
    """A model by preset name or file; ``overrides`` replace single fields.

    Raises:
        ConfigError: unknown, or a field that is unknown, missing or does not work.
    """
    data, where = read_toml("models", name)
    stem = Path(name).stem if name.endswith(".toml") else name
    return make_model({"name": stem, **data, **overrides}, where)


def make_model(values: Mapping[str, Any], where: str = "model") -> Model:
    """A Model of ``values`` by field name, checked for unknown and missing fields and for types.

    Raises:
        ConfigError: names the field as Megatron's flag.
    """
    known = {field.name: str(field.type) for field in fields(Model)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where}: {name!r} is not a field of a model; num_layers is one")
        _check_type(where, name, value, known[name])
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if name not in values:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is missing; give it, or a whole shape by --model gpt-7b")
    return Model(**values)


def _check_type(where: str, name: str, value: Any, kind: str) -> None:
    """Field ``name`` is annotated ``kind``; complain in its flag's name if ``value`` is not one."""
    flag = f"{where}: {name}"
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ConfigError(f"{flag} {value!r} is unknown; {' or '.join(_CHOICES[name])} works")
    elif kind.startswith("int"):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{flag} {value!r} is not a whole number; {name} = 32 is one")
    elif kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{flag} {value!r} is not true or false; {name} = true works")
    elif kind == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{flag} {value!r} is not a number; {name} = 0.1 works")
