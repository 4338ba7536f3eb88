"""Where lengths vary, the wait for a gradient is the wait for its shape: that is the stall."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lynx.integration.windows import Hooks, windowed_shapes
from megatron_lynx.plan import Window


class Communicator:
    """Exchanges shapes as Megatron's does: launches all transfers, then waits for each."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> str:
        for work in torch.distributed.batch_isend_irecv(["sent", "received"]):
            work.wait()
        self.told.append("known")
        return "shapes"


class Stalling:
    """Stands for an executor that has something to do in a stall."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def stall_window(self) -> Window:
        return Window("stall")

    def pass_window(self, window: Window, wait: Any) -> Any:
        self.told.append(window.kind)
        return wait()


@pytest.mark.parametrize(
    ("recv_next", "executes", "seen"),
    [
        (True, True, ["launched", "stall", "waited", "waited", "known"]),
        (False, True, ["launched", "waited", "waited", "known"]),
        (True, False, ["launched", "waited", "waited", "known"]),
    ],
)
def test_work_is_done_between_launch_and_wait(
    monkeypatch: pytest.MonkeyPatch, recv_next: bool, executes: bool, seen: list[str]
) -> None:
    told: list[str] = []

    def launch(operations: list[str]) -> list[Any]:
        told.append("launched")
        return [SimpleNamespace(wait=lambda: told.append("waited")) for _ in operations]

    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", launch)
    hooks: Any = Hooks()
    hooks.executor = Stalling(told) if executes else None
    windowed: Any = windowed_shapes(Communicator, hooks)
    assert windowed(told)._communicate_shapes(None, None, False, recv_next) == "shapes"
    assert told == seen
    assert torch.distributed.batch_isend_irecv is launch
