"""What TE's Python asks its extension at import, or before it chooses a kernel."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from torch import bfloat16, float16, float32, int32, uint8

FACTS = (
    *("DType", "CommOverlapHelper", "CommOverlap", "CommOverlapP2P"),
    *("FP8TensorMeta", "get_cudnn_version", "get_cublasLt_version", "get_num_cublas_streams"),
    *("get_stream_priority_range", "device_supports_multicast", "ubuf_built_with_mpi"),
)
"""Names that the extension takes from here."""


def _enumeration(name: str, members: dict[str, int]) -> Any:
    make: Any = enum.IntEnum
    return make(name, members)


_NUMBER = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
DType = _enumeration("DType", _NUMBER)
"""Types of elements; TE compares them with an enumeration of its own, by name and number."""

TORCH_TYPE = dict(zip(_NUMBER.values(), (uint8, int32, float32, float16, bfloat16), strict=False))


class CommOverlapHelper:
    """Overlap by user buffers: nothing makes one."""


class CommOverlap:
    """Overlap by user buffers: nothing makes one."""


class CommOverlapP2P:
    """Overlap by user buffers: nothing makes one."""


class FP8TensorMeta:
    """Scales of FP8 tensors: nothing makes them."""


def refuse(**given: Any) -> None:
    """NotImplementedError that names each argument that has a value which the reference cannot treat."""
    bad = [name for name, value in given.items() if value is not None and value is not False]
    if bad:
        raise NotImplementedError(f"the CPU reference of Transformer Engine has no {', '.join(bad)}")


def get_cudnn_version() -> int:
    """9.14.0: TE 2.20 refuses less than 9.12."""
    return 91400


def get_cublasLt_version() -> int:  # noqa: N802 (the extension's name)
    """13.0."""
    return 130000


def get_num_cublas_streams() -> int:
    """As on a GPU."""
    return 4


def get_stream_priority_range(device: int = -1) -> tuple[int, int]:
    """There is one stream."""
    return (0, 0)


def device_supports_multicast(device: int = -1) -> bool:
    """There is one device."""
    return False


def ubuf_built_with_mpi() -> bool:
    """No user buffers."""
    return False


def fused_attention(version: str) -> tuple[Any, Callable[..., Any]]:
    """The places where fused attention may run, and the function that chooses cuDNN.

    TE's Python has ruled out fp32 before it asks. The newest compares the names with its own and wants
    a reason beside the choice, 2.14 has one place more.
    """
    places = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 16):
        places["NVTE_F16_max512_seqlen"] = 0
    backends = _enumeration("NVTE_Fused_Attn_Backend", places)
    chosen = backends.NVTE_F16_arbitrary_seqlen

    def get_fused_attn_backend(*args: Any) -> Any:
        return (chosen, "") if len(args) == 1 else chosen

    return backends, get_fused_attn_backend
