"""The CPU reference of Transformer Engine's kernels against autograd of plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.te_reference import Settings, attention, flash, linear, norms, optimizers, rope, softmax
from tests.support.te_reference.facts import DType
from tests.support.te_reference.loading import _Enumeration

FP32, BF16 = int(DType.kFloat32), int(DType.kBFloat16)
Layout, Format, Mask, Softmax, Bias = (
    _Enumeration(name, (), {}) for name in ("Layout", "Format", "Mask", "Softmax", "Bias")
)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers that the same call gives again, as a leaf of a graph."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 97 * len(shape)))
    return numbers.to(dtype).requires_grad_()


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Equal but for rounding, in shape and in type."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# --- matrix products -----------------------------------------------------------------------------


def gemm(a: Any, b: Any, layout: str, **options: Any) -> list[Any]:
    """``generic_gemm`` with TE's names of layouts."""
    into, kind = options.pop("into", None), options.pop("out", FP32)
    bias, grad = options.pop("bias", None), options.pop("grad", False)
    accumulate = options.pop("accumulate", False)
    flags = (False, None, grad, torch.empty(0), 0, accumulate, False)
    transposed = (layout[0] == "T", layout[1] == "T")
    a, b = (None if t is None else t.detach() for t in (a, b))
    return linear.generic_gemm(
        a, transposed[0], b, transposed[1], into, None, kind, bias, BF16, *flags, **options
    )


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 7), st.booleans())
def test_the_products_of_a_linear(s: int, b: int, i: int, o: int, biased: bool) -> None:
    x, weight = draw(s, b, i), draw(o, i, seed=1)
    bias = draw(o, seed=2) if biased else None
    y = torch.nn.functional.linear(x, weight, bias)
    gradient = draw(*y.shape, seed=3).detach()
    y.backward(gradient)
    close(gemm(weight, x, "TN", bias=None if bias is None else bias.detach())[0], y.detach())
    close(gemm(weight, gradient, "NN")[0], x.grad)
    wgrad, bgrad, *_ = gemm(x, gradient, "NT", grad=True, bias=None if bias is None else bias.detach())
    close(wgrad, weight.grad)
    assert (bgrad is None) == (bias is None)
    if bias is not None:
        close(bgrad, bias.grad)


def test_a_weight_gradient_in_fp32_is_not_rounded_on_its_way() -> None:
    x, gradient = (draw(40, n, seed=n, dtype=torch.bfloat16).detach() for n in (8, 6))
    exact = gradient.float().t() @ x.float()
    close(gemm(x, gradient, "NT", out=FP32)[0], exact)
    total = torch.ones(6, 8)
    out = gemm(x, gradient, "NT", into=total, accumulate=True, out=FP32)[0]
    assert out is total
    close(total, exact + 1)


def test_what_no_dense_layer_asks_for_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="comm_overlap"):
        gemm(draw(2, 2), draw(2, 2), "TN", comm_overlap=object())


# --- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms(kind: str, dtype: torch.dtype, centred: bool) -> None:
    x, gain, shift = draw(3, 2, 16, dtype=dtype), draw(16, seed=1), draw(16, seed=2)
    scale = gain + 1 if centred else gain
    if kind == "LayerNorm":
        want = torch.nn.functional.layer_norm(x.float(), (16,), scale, shift, 1e-5)
        fixed = (None, None, FP32, 0, centred)
        got, mean, inverse = norms.layernorm_fwd(x.detach(), gain.detach(), shift.detach(), 1e-5, *fixed)
        close(mean, x.detach().float().mean(-1).flatten())
    else:
        want = torch.nn.functional.rms_norm(x.float(), (16,), scale, 1e-5)
        got, mean, inverse = norms.rmsnorm_fwd(x.detach(), gain.detach(), 1e-5, None, None, FP32, 0, centred)
        assert mean is None
    assert inverse is not None
    assert inverse.dtype == torch.float32
    assert inverse.shape == (6,)
    close(got, want.detach())
    gradient = draw(*want.shape, seed=4).detach()
    want.backward(gradient)
    saved = (x.detach(), *((mean,) if kind == "LayerNorm" else ()), inverse, gain.detach())
    backward = norms.layernorm_bwd if kind == "LayerNorm" else norms.rmsnorm_bwd
    gradients = backward(gradient, *saved, 0, centred)  # type: ignore[operator]
    wanted = (x.grad, gain.grad, *((shift.grad,) if kind == "LayerNorm" else ()))
    for ours, theirs in zip(gradients, wanted, strict=True):
        close(ours, theirs, 2e-2 if dtype == torch.bfloat16 else 1e-5)


# --- softmax -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scaled", "scaled_masked", "scaled_upper_triang_masked"])
def test_softmax(kind: str) -> None:
    scores, mask = draw(2, 3, 5, 5), torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    if kind != "scaled":
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1).expand(2, 1, 5, 5)
    want = torch.softmax((scores * 0.3).masked_fill(mask, -10000.0), -1)
    given_mask = (mask,) if kind == "scaled_masked" else ()
    got = getattr(softmax, f"{kind}_softmax_forward")(scores.detach(), *given_mask, torch.tensor(0.3))
    close(got, want.detach())
    gradient = draw(*want.shape, seed=1).detach()
    want.backward(gradient)
    close(getattr(softmax, f"{kind}_softmax_backward")(gradient, got, torch.tensor(0.3)), scores.grad)


# --- attention -----------------------------------------------------------------------------------


def plain_attention(
    q: Any, k: Any, v: Any, scale: float, hidden: Any, offset: Any = None, factors: Any = None
) -> torch.Tensor:
    """Attention of [b, h, s, d] in plain torch, with the gradient that autograd gives it."""
    heads = q.shape[1]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = (q.float() @ k.transpose(-1, -2) * scale).masked_fill(hidden, -math.inf)
    if offset is not None:
        scores = torch.cat((scores, offset.expand(*scores.shape[:-1], 1)), -1)
    shares = torch.softmax(scores, -1)[..., : k.shape[2]]
    return (shares if factors is None else shares * factors) @ v


def fused(
    q: Any, k: Any, v: Any, gradient: Any, *, form: str, mask: str, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Forward and backward of ``fused_attn_*`` with the arguments in TE's order."""
    q, k, v, gradient = (t.detach() for t in (q, k, v, gradient))
    sequences = options.get("sequences", torch.tensor([0, 0], dtype=torch.int32))
    layout = getattr(Layout, f"NVTE_{'_'.join([form.upper()] * 3)}")
    kind = getattr(Format, f"NVTE_{form.upper()}")
    masks = getattr(Mask, f"NVTE_{mask}_MASK")
    soft = getattr(Softmax, f"NVTE_{options.get('softmax', 'VANILLA')}_SOFTMAX")
    window, dropout, offset = (
        options.get("window", (-1, -1)),
        options.get("dropout", 0.0),
        options.get("offset"),
    )
    common = (Bias.NVTE_NO_BIAS, masks, soft, window, "BOTTOM_RIGHT" in mask)
    ends = (sequences, sequences, q, k, v)
    forward = attention.fused_attn_fwd(
        *(8, 8, True, 0.5, dropout, True, layout, kind, kind, *common, *ends, q.dtype),
        *(None, None, None, None, None, None, None, offset, None, 16, False, False),
    )
    out, *saved = forward
    backward = attention.fused_attn_bwd(
        *(8, 8, 0.5, dropout, True, layout, kind, kind, layout, kind, kind, *common, False, *ends),
        *(out, gradient.to(out.dtype), q.dtype, saved, None, None, None, None, None, False),
    )
    return forward, backward


def heads_first(x: torch.Tensor, form: str) -> torch.Tensor:
    """[b, h, s, d] of sbhd or bshd."""
    return x.permute(1, 2, 0, 3) if form == "sbhd" else x.permute(0, 2, 1, 3)


def compare(
    forward: list[Any], backward: list[Any], want: torch.Tensor, inputs: list[Any], form: str
) -> None:
    """Output and gradients of the kernel against autograd's."""
    close(heads_first(forward[0], form).float(), want.detach(), 2e-2)
    gradient = heads_first(draw(*forward[0].shape, seed=9).detach(), form)
    want.backward(gradient.to(torch.bfloat16).float())
    for ours, leaf in zip(backward[:3], inputs, strict=True):
        close(ours, leaf.grad, 4e-2)


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    ("mask", "window", "kind"),
    [
        ("NO", (-1, -1), "VANILLA"),
        ("CAUSAL", (-1, 0), "VANILLA"),
        ("CAUSAL", (2, 0), "VANILLA"),
        ("CAUSAL", (-1, 0), "OFF_BY_ONE"),
        ("CAUSAL", (-1, 0), "LEARNABLE"),
    ],
)
def test_fused_attention(form: str, groups: int, mask: str, window: tuple[int, int], kind: str) -> None:
    rows = (6, 2) if form == "sbhd" else (2, 6)
    q, k, v = (draw(*rows, n, 8, seed=i, dtype=torch.bfloat16) for i, n in enumerate((4, groups, groups)))
    offset = draw(1, 4, 1, 1, seed=5) if kind == "LEARNABLE" else None
    gradient = draw(*q.shape, seed=9)
    options = {"window": window, "softmax": kind, "offset": None if offset is None else offset.detach()}
    forward, backward = fused(q, k, v, gradient, form=form, mask=mask, **options)
    assert [(t.shape, t.dtype) for t in forward[1:3]] == [
        ((2, 4, 6, 1), torch.float32),
        ((2,), torch.int64),
    ]
    place = torch.arange(6)
    distance = place[None] - place[:, None]
    hidden = (distance > 0) if mask == "CAUSAL" else torch.zeros(6, 6, dtype=torch.bool)
    if window[0] >= 0:
        hidden = hidden | (distance < -window[0])
    extra = torch.zeros(1, 4, 1, 1) if kind == "OFF_BY_ONE" else offset
    want = plain_attention(*(heads_first(t, form) for t in (q, k, v)), 0.5, hidden, extra)
    compare(forward, backward, want, [q, k, v], form)
    if offset is not None:
        close(backward[4], offset.grad, 4e-2)


def test_dropout_of_fused_attention_is_the_same_in_backward() -> None:
    q, k, v = (draw(6, 2, 4, 8, seed=i, dtype=torch.bfloat16) for i in range(3))
    torch.manual_seed(3)
    forward, backward = fused(q, k, v, draw(*q.shape, seed=9), form="sbhd", mask="NO", dropout=0.5)
    factors = attention.dropout_factors((2, 4, 6, 6), 0.5, forward[2], 0)
    assert factors is not None
    assert set(factors.unique().tolist()) == {0.0, 2.0}
    nothing = torch.zeros(6, 6, dtype=torch.bool)
    want = plain_attention(*(heads_first(t, "sbhd") for t in (q, k, v)), 0.5, nothing, None, factors)
    compare(forward, backward, want, [q, k, v], "sbhd")


def test_packed_sequences_are_sequences_of_their_own() -> None:
    q, k, v = (draw(7, 4, 8, seed=i, dtype=torch.bfloat16) for i in range(3))
    gradient = draw(7, 4, 8, seed=9)
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    forward, backward = fused(q, k, v, gradient, form="thd", mask="PADDING_CAUSAL", sequences=bounds)
    assert forward[1].shape == (7, 4, 1)
    for start, end in ((0, 3), (3, 7)):
        alone = [t[start:end, None] for t in (q, k, v, gradient)]
        one, back = fused(*alone, form="sbhd", mask="CAUSAL")
        close(forward[0][start:end], one[0][:, 0])
        for packed, single in zip(backward[:3], back[:3], strict=True):
            close(packed[start:end], single[:, 0])
    ours = flash.flash_attn_varlen_func(q, k, v, bounds, bounds, 4, 4, 0.0, 0.5, True)
    close(ours.detach(), forward[0])
    ours.backward(gradient.detach().to(ours.dtype))
    for leaf, want in zip((q, k, v), backward[:3], strict=True):
        close(leaf.grad, want)


def test_padded_rows_get_nothing() -> None:
    q, k, v = (draw(2, 6, 4, 8, seed=i, dtype=torch.bfloat16) for i in range(3))
    bounds = torch.tensor([0, 6, 10], dtype=torch.int32)
    forward, _ = fused(q, k, v, q, form="bshd", mask="PADDING", sequences=bounds)
    assert forward[0][1, 4:].abs().sum() == 0
    alone, _ = fused(*(t[1:, :4] for t in (q, k, v, q)), form="bshd", mask="NO")
    close(forward[0][1:, :4], alone[0])


@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
def test_flash_attention(window: tuple[int, int]) -> None:
    q, k, v = (draw(2, 6, n, 8, seed=i, dtype=torch.bfloat16) for i, n in enumerate((4, 2, 2)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        saved: list[torch.Tensor] = []
        out = flash.flash_attn_func(q, k, v, 0.0, 0.5, True, window)
    assert [(tuple(t.shape), t.dtype) for t in saved[3:]] == [
        ((2, 6, 4, 8), torch.bfloat16),
        ((2, 4, 6), torch.float32),
        ((2,), torch.int64),
    ]
    gradient = draw(*q.shape, seed=9)
    forward, backward = fused(q, k, v, gradient, form="bshd", mask="CAUSAL", window=(window[0], 0))
    close(out.detach(), forward[0])
    out.backward(gradient.detach().to(out.dtype))
    for leaf, want in zip((q, k, v), backward[:3], strict=True):
        close(leaf.grad, want)


def test_fused_attention_moves_the_generator_as_cudnn_does(monkeypatch: pytest.MonkeyPatch) -> None:
    q = draw(6, 2, 4, 8, dtype=torch.bfloat16)

    def moved() -> bool:
        before = torch.get_rng_state()
        fused(q, q, q, q, form="sbhd", mask="CAUSAL")
        return not torch.equal(before, torch.get_rng_state())

    assert moved()
    monkeypatch.setattr(Settings, "attention_moves_generator", False)
    assert not moved()


# --- rotary embedding and the optimizer ---------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved: bool) -> None:
    x, gradient = draw(5, 2, 3, 8), draw(5, 2, 3, 8, seed=1).detach()
    freqs = torch.outer(torch.arange(9.0), torch.tensor([0.5, 0.1]))  # the first four of eight are turned
    freqs = (freqs.repeat_interleave(2, 1) if interleaved else torch.cat((freqs, freqs), 1))[:, None, None]
    first, second = (slice(0, 4, 2), slice(1, 4, 2)) if interleaved else (slice(0, 2), slice(2, 4))
    pair = torch.complex(x[..., first], x[..., second])
    turned = pair * torch.polar(torch.ones(5, 1, 1, 2), freqs[:5, :, :, first])
    want = x.clone()
    want[..., first], want[..., second] = turned.real, turned.imag
    arguments = (freqs, None, Format.NVTE_SBHD, interleaved, None, 1, 0)
    close(rope.fused_rope_forward(x.detach(), *arguments), want.detach())
    want.backward(gradient)
    close(rope.fused_rope_backward(gradient, *arguments), x.grad)


def test_rotary_embedding_of_packed_sequences_starts_anew() -> None:
    x = draw(7, 3, 4).detach()
    freqs = torch.outer(torch.arange(9.0), torch.tensor([0.5, 0.1, 0.5, 0.1]))[:, None, None]
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = rope.fused_rope_forward(x, freqs, None, Format.NVTE_THD, False, bounds, 1, 0)
    for start, end in ((0, 3), (3, 7)):
        arguments = (freqs, None, Format.NVTE_SBHD, False, None, 1, 0)
        close(packed[start:end], rope.fused_rope_forward(x[start:end, None], *arguments)[:, 0])


@pytest.mark.parametrize("mode", [0, 1])
def test_adam(mode: int) -> None:
    weight = draw(4, 3)
    ours, mean, square = weight.detach().clone(), torch.zeros(4, 3), torch.zeros(4, 3)
    half, master = ours.to(torch.bfloat16), ours.clone()
    moments = mean.clone(), square.clone()
    kind = torch.optim.AdamW if mode else torch.optim.Adam
    theirs = kind([weight], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    noop = torch.zeros(1, dtype=torch.int32)
    for step in (1, 2, 3):
        weight.grad = draw(4, 3, seed=step).detach()
        theirs.step()
        constants = (0.1, 0.9, 0.95, 1e-8, step, mode, 1, 0.1)
        optimizers.multi_tensor_adam(1, noop, [[weight.grad], [ours], [mean], [square]], *constants)
        lists = [[weight.grad], [half], [moments[0]], [moments[1]], [master]]
        optimizers.multi_tensor_adam(1, noop, lists, *constants)
    close(ours, weight.detach())
    close(master, weight.detach())
    assert torch.equal(half, master.to(torch.bfloat16))


def test_norms_and_scales_of_lists() -> None:
    tensors, noop = [draw(3).detach(), draw(2, 2).detach()], torch.zeros(1, dtype=torch.int32)
    whole, each = optimizers.multi_tensor_l2norm(1, noop, [tensors], True)
    close(whole, torch.cat([t.flatten() for t in tensors]).norm()[None])
    close(each, torch.stack([t.norm() for t in tensors]))
    out = [torch.empty_like(t) for t in tensors]
    optimizers.multi_tensor_scale_tensor(1, noop, [tensors, out], torch.tensor(0.5))
    close(out, [t * 0.5 for t in tensors])
