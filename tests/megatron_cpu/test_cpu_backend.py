"""Stock Megatron on the CPU backend: it trains, in every parallel form, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lynx.errors import ConfigError
from megatron_lynx.integration.cpu import backend as cpu
from tests.support.launch import RanksFailedError, run_ranks
from tests.support.small_gpt import train_small_gpt

Results = dict[str, list[dict[str, Any]]]

TWO_RANKS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 again": {"tp": 2},
    "tp2 no dropout": {"tp": 2, "dropout": 0.0},
    "tp2 sp no dropout": {"tp": 2, "dropout": 0.0, "sequence_parallel": True},
    "tp2 rms no dropout": {"tp": 2, "dropout": 0.0, "normalization": "RMSNorm"},
    "tp2 sp rms no dropout": {
        "tp": 2,
        "dropout": 0.0,
        "sequence_parallel": True,
        "normalization": "RMSNorm",
    },
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "tp2 bf16": {"tp": 2, "bf16": True},
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "dp2": {},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 pp2 sp": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "tp2 pp2 vpp2 sp": {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
}


def train(rank: int, world_size: int, payload: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train one small GPT for each configuration; returns what each came to."""
    return {name: train_small_gpt(steps=3, **fields) for name, fields in payload.items()}


def _train(world_size: int, configurations: dict[str, dict[str, Any]]) -> Results:
    ranks = run_ranks(world_size, f"{__name__}:train", configurations, timeout_s=400)
    return {name: [rank[name] for rank in ranks] for name in configurations}


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return _train(2, TWO_RANKS)


def _losses(by_rank: list[dict[str, Any]]) -> torch.Tensor:
    """The losses of the last stage: one row per step, one column per microbatch."""
    return torch.tensor(by_rank[-1]["losses"], dtype=torch.float64)


def _replicated(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters that every rank of a tensor parallel group holds whole."""
    ends = ("layernorm.weight", "layernorm.bias", "proj.bias", "fc2.bias", "position_embeddings.weight")
    return {name: value for name, value in parameters.items() if name.endswith(ends)}


def test_losses_fall_and_are_finite(two_ranks: Results) -> None:
    four_ranks = _train(4, FOUR_RANKS)
    for name, by_rank in {**two_ranks, **four_ranks}.items():
        losses = _losses(by_rank)
        assert losses.shape[0] == 3, name
        assert torch.isfinite(losses).all(), name
        assert all(0 < norm < 10 for rank in by_rank for norm in rank["grad_norms"]), name


def test_a_run_repeats_to_the_bit(two_ranks: Results) -> None:
    for once, again in zip(two_ranks["tp2"], two_ranks["tp2 again"], strict=True):
        assert once["losses"] == again["losses"]
        assert once["grad_norms"] == again["grad_norms"]
        for name, value in once["parameters"].items():
            assert torch.equal(value, again["parameters"][name]), name


@pytest.mark.parametrize("name", ["tp2", "tp2 sp", "tp2 sp rms no dropout", "tp2 bf16"])
def test_replicated_parameters_stay_equal_over_the_tensor_parallel_group(
    two_ranks: Results, name: str
) -> None:
    """They would not if a norm's gradients were not summed, or if ranks dropped other elements."""
    first, second = (_replicated(rank["parameters"]) for rank in two_ranks[name])
    assert len(first) >= 4 * 4
    for parameter, value in first.items():
        assert torch.equal(value, second[parameter]), parameter


@pytest.mark.parametrize("norm", ["", " rms"])
def test_sequence_parallelism_computes_the_same(two_ranks: Results, norm: str) -> None:
    without, with_sp = two_ranks[f"tp2{norm} no dropout"], two_ranks[f"tp2 sp{norm} no dropout"]
    torch.testing.assert_close(_losses(with_sp), _losses(without), rtol=1e-5, atol=0)
    torch.testing.assert_close(with_sp[0]["grad_norms"], without[0]["grad_norms"], rtol=1e-4, atol=0)


def fail_on_rank_one(rank: int, world_size: int, payload: object) -> None:
    """Raise on one rank while the other waits for it in a collective."""
    if rank == 1:
        raise RuntimeError("a fault of rank one")
    torch.distributed.barrier()


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(RanksFailedError, match="a fault of rank one"):
        run_ranks(2, f"{__name__}:fail_on_rank_one", timeout_s=120)


# --- in this process -----------------------------------------------------------------------------


def _targets() -> list[tuple[Any, str]]:
    from megatron.core.datasets import utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    replaced = [(owner, name) for owner, name, _value in cpu._replacements()]
    return [*replaced, (WrappedTorchNorm, "__new__"), (utils, "compile_helpers")]


def test_undo_leaves_every_name_as_it_was() -> None:
    targets = _targets()
    missing = object()
    before = [vars(owner).get(name, missing) for owner, name in targets]
    with cpu.cpu_backend():
        during = [vars(owner).get(name, missing) for owner, name in targets]
        assert cpu.cpu_backend_active()
    after = [vars(owner).get(name, missing) for owner, name in targets]
    assert len(targets) > 50
    assert all(now is not then for now, then in zip(during, before, strict=True))
    assert all(now is then for now, then in zip(after, before, strict=True))
    assert not cpu.cpu_backend_active()
    assert not torch.cuda.is_available()


def test_undo_after_an_error() -> None:
    original = torch.cuda.is_available
    with pytest.raises(KeyError), cpu.cpu_backend():
        raise KeyError
    assert torch.cuda.is_available is original
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_cuda_means_cpu() -> None:
    with cpu.cpu_backend():
        index = torch.cuda.current_device()
        made = [
            torch.zeros(2, device="cuda"),
            torch.ones(2, device=index),
            torch.empty(2, device=torch.device("cuda", index), pin_memory=True),
            torch.zeros(2).cuda(),
            torch.zeros(2).to("cuda:0"),
            torch.zeros(2).to(device="cuda", dtype=torch.float32),
            torch.zeros_like(torch.zeros(2), device="cuda"),
            torch.cuda.FloatTensor([0.0, 0.0]),
            torch.nn.Linear(2, 2).cuda().weight,
        ]
        assert all(tensor.device.type == "cpu" for tensor in made)
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype == torch.float16


class _MakesTensorsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.ones(grad.shape, device="cuda")


def test_cuda_means_cpu_in_the_backward_pass() -> None:
    with cpu.cpu_backend():
        x = torch.zeros(2, requires_grad=True)
        _MakesTensorsInBackward.apply(x).sum().backward()
        torch.autograd.backward(_MakesTensorsInBackward.apply(x).sum())
        (grad,) = torch.autograd.grad(_MakesTensorsInBackward.apply(x).sum(), x)
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0]
    assert grad.tolist() == [2.0, 2.0]


def test_reading_data_leaves_the_dropout_alone() -> None:
    """Only the first rank of a tensor parallel group reads data."""
    with cpu.cpu_backend():
        before = torch.cuda.get_rng_state()
        batches = list(torch.utils.data.DataLoader(range(4), batch_size=2, pin_memory=True))
        assert torch.equal(torch.cuda.get_rng_state(), before)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]


def test_the_random_state_warning_is_silent_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.tensor_parallel import random

    def draw() -> list[str]:
        caplog.clear()
        tracker = random.CudaRNGStatesTracker()
        tracker.add("a state", 1)
        with tracker.fork("a state"):
            torch.rand(1)
            random.logging.getLogger(random.__name__).warning("something else")
        return [record.getMessage() for record in caplog.records]

    with cpu.cpu_backend():
        assert draw() == ["something else"]


def test_cuda_present_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with (
        pytest.raises(ConfigError, match=r"MEGATRON_LYNX_CPU=1, but CUDA is present \(3 devices\)"),
        cpu.cpu_backend(),
    ):
        pass


def test_entering_twice_is_refused() -> None:
    with cpu.cpu_backend(), pytest.raises(ConfigError, match="active already"), cpu.cpu_backend():
        pass


@pytest.mark.parametrize(("value", "wanted"), [("", False), ("0", False), ("1", True)])
def test_the_environment_asks(value: str, wanted: bool) -> None:
    assert cpu.cpu_requested({cpu.ENVIRONMENT_VARIABLE: value}) is wanted


def test_another_value_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="MEGATRON_LYNX_CPU='yes': expected 1"):
        cpu.cpu_requested({cpu.ENVIRONMENT_VARIABLE: "yes"})
