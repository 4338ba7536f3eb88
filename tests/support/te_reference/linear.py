"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.te_reference.facts import TORCH_TYPE, refuse

KERNELS = ("generic_gemm",)


def generic_gemm(
    A: torch.Tensor,  # noqa: N803 (names of cuBLAS)
    transA: bool,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    transB: bool,  # noqa: N803
    D: torch.Tensor | None,  # noqa: N803
    quantizer: Any,
    output_dtype: int | None,
    bias: torch.Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[torch.Tensor | None]:
    """``op(B) @ op(A)`` of matrices in rows, into ``D`` if it is given; with it the bias gradient.

    All but the last dimension are rows. With ``grad`` a bias asks for its gradient, the sum of B's
    rows; without, it is added.
    """
    refuse(quantizer=quantizer, comm_overlap=comm_overlap, extra_output=extra_output, gelu=gelu)
    refuse(alpha=None if alpha == 1.0 else alpha, beta=None if beta in (None, 0.0, 1.0) else beta)
    rows = B.reshape(-1, B.shape[-1])
    a, b = A.reshape(-1, A.shape[-1]), rows
    a, b = (a.t() if transA else a), (b.t() if transB else b)
    if D is not None:
        wanted = D.dtype
    else:
        wanted = A.dtype if output_dtype is None else TORCH_TYPE[int(output_dtype)]
    if wanted == torch.float32 and A.dtype != wanted:  # the accumulator is fp32: it is not rounded on its way
        a, b = a.float(), b.float()
    out = torch.matmul(b, a)
    if not transB:
        out = out.view(*B.shape[:-1], out.shape[-1])
    bias_gradient = None
    if bias is not None and bias.numel():
        if grad:
            bias_gradient = rows.sum(0)
        else:
            out = out + bias
    if D is None:
        return [out.to(wanted), bias_gradient, None, None]
    if accumulate:
        D.add_(out)
    else:
        D.copy_(out)
    return [D, bias_gradient, None, None]
