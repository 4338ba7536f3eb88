"""What is replaced in Megatron is checked before, and is the original object again afterwards."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.errors import InstallError
from megatron_lynx.integration.install import install
from megatron_lynx.integration.targets import TARGETS, Target
from megatron_lynx.integration.trainer import Trainer, trainer_targets
from megatron_lynx.integration.windows import Hooks


def every_target() -> tuple[Target, ...]:
    return (*TARGETS, *trainer_targets(Trainer(Hooks())))


def objects(targets: tuple[Target, ...]) -> list[Any]:
    found = []
    for target in targets:
        module, _, name = target.path.rpartition(".")
        found.append(getattr(importlib.import_module(module), name))
    return found


def test_every_name_is_replaced_and_given_back() -> None:
    targets = every_target()
    before = objects(targets)
    with install(targets=targets):
        assert all(now is not was for now, was in zip(objects(targets), before, strict=True))
    assert all(now is was for now, was in zip(objects(targets), before, strict=True))


def test_names_are_given_back_after_an_error() -> None:
    before = objects(TARGETS)
    with pytest.raises(RuntimeError, match="inside"), install():
        raise RuntimeError("inside")
    assert all(now is was for now, was in zip(objects(TARGETS), before, strict=True))


def test_importing_everything_replaces_nothing() -> None:
    import torch.distributed
    from megatron.core.tensor_parallel import layers

    assert layers.dist_all_gather_func is torch.distributed.all_gather_into_tensor


def keep(original: Callable[..., Any], _: Hooks) -> Callable[..., Any]:
    return original


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target("megatron.core.tensor_parallel.mappings.gone", (), keep), "mappings.gone is missing"),
        (Target("megatron.core.no_such_module.name", (), keep), "no_such_module.name is missing"),
        (dataclasses.replace(TARGETS[0], parameters=("tensor", "group")), "all_reduce takes"),
    ],
)
def test_a_target_that_changed_is_named_and_nothing_is_replaced(target: Target, message: str) -> None:
    before = objects(TARGETS)
    with pytest.raises(InstallError, match=message), install(targets=(*TARGETS, target)):
        raise AssertionError("installed all the same")
    assert all(now is was for now, was in zip(objects(TARGETS), before, strict=True))


def test_installing_twice_is_an_error() -> None:
    with install():
        with pytest.raises(InstallError, match="installed already"), install():
            raise AssertionError("installed twice")
        assert objects(TARGETS)  # the first one still stands
