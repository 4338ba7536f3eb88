"""Makes ``import transformer_engine`` work without CUDA, when it is first asked for.

The wheel's ``common`` package loads cuDNN and the core library, and its ``pytorch`` package the
compiled extension. TE's own switch for its build leaves out the former; between the two a finder
puts the reference in place of the latter.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from importlib.machinery import ModuleSpec
from typing import Any

from tests.support.te_reference import CALLS

EXTENSION = "transformer_engine_torch"
FLASH_VERSION = "2.8.3"
"""The newest flash-attn that TE 2.17 takes."""
_BUILDING = "NVTE_PROJECT_BUILDING"


def register() -> None:
    """Let this process find the reference; imports nothing before it is asked for."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds no module itself: it prepares what the imports of TE's packages will find."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "transformer_engine":
            os.environ[_BUILDING] = "1"
        elif name == "transformer_engine.pytorch":
            os.environ.pop(_BUILDING, None)
            _put_in_place()
        return None

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if getattr(context, "name", None) in ("flash-attn", "flash_attn"):
            yield _FlashDistribution()


class _FlashDistribution(importlib.metadata.Distribution):
    """TE asks for the version of the installed flash-attn before it imports it."""

    @property
    def metadata(self) -> Any:
        fields = Message()
        fields["Name"], fields["Version"] = "flash-attn", FLASH_VERSION
        return fields

    def read_text(self, filename: str) -> str | None:
        return None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


def _put_in_place() -> None:
    import torch
    import transformer_engine.common as common

    from tests.support.te_reference import flash

    sys.modules[EXTENSION] = _extension()
    # ONNX export wants packages of its own and plays no part in training.
    onnx = "transformer_engine.pytorch.onnx_extensions"
    sys.modules[onnx] = _Stand(onnx)
    sys.modules.update(flash.modules())
    common.load_framework_extension = lambda framework: None
    # TE refuses tensors that are not on a GPU.
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]


class _Stand(types.ModuleType):
    """A module in which every name exists: functions that refuse to be called, and enumerations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Enumeration(name, (), {}) if name[0].isupper() else _missing(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


def _missing(path: str) -> Callable[..., Any]:
    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{path} is not in the CPU reference")

    missing.__name__ = path.rpartition(".")[2]
    return missing


class Member(int):
    """A value of an enumeration of the extension: a number with a name."""

    name: str


class _Enumeration(type):
    """An enumeration whose members get their numbers as they are first asked for."""

    def __getattr__(cls, name: str) -> Member:
        if name.startswith("_"):
            raise AttributeError(name)
        member = Member(sum(isinstance(value, Member) for value in vars(cls).values()))
        member.name = name
        setattr(cls, name, member)
        return member


def _extension() -> types.ModuleType:
    from tests.support.te_reference import attention, facts, linear, norms, optimizers, rope, softmax

    made = _Stand(EXTENSION)
    for module in (attention, linear, norms, optimizers, rope, softmax):
        for name in module.KERNELS:
            setattr(made, name, _counted(name, getattr(module, name)))
    for name in facts.FACTS:
        setattr(made, name, getattr(facts, name))
    version = importlib.metadata.version("transformer_engine")
    made.NVTE_Fused_Attn_Backend, made.get_fused_attn_backend = facts.fused_attention(version)  # type: ignore
    made.runs_on_cpu = True  # type: ignore[attr-defined]
    return made


def _counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return kernel(*args, **kwargs)

    call.__name__ = name
    return call
