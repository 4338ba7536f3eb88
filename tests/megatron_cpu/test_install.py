"""What is replaced in Megatron is checked before, and is the original object again afterwards."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core
import pytest

from megatron_lynx.errors import InstallError
from megatron_lynx.integration import versions
from megatron_lynx.integration.binding import inner_functions
from megatron_lynx.integration.install import install
from megatron_lynx.integration.targets import TARGETS, Target
from megatron_lynx.integration.trainer import Trainer, trainer_targets
from megatron_lynx.integration.windows import Hooks


def every_target() -> tuple[Target, ...]:
    return (*TARGETS, *trainer_targets(Trainer(Hooks())))


def targets_here() -> tuple[Target, ...]:
    """Those of this version of Megatron."""
    return tuple(target for target in every_target() if versions.belongs(target.path))


def objects(targets: tuple[Target, ...]) -> list[Any]:
    found = []
    for target in targets:
        module, _, name = target.path.rpartition(".")
        found.append(getattr(importlib.import_module(module), name))
    return found


def test_every_name_is_replaced_and_given_back() -> None:
    targets = targets_here()
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
    ("path", "message"),
    [
        ("megatron.core.tensor_parallel.mappings.gone", "mappings.gone is missing"),
        ("megatron.core.no_such_module.name", "no_such_module.name is missing"),
        ("torch.distributed.all_reduce", r"all_reduce takes \(tensor, op, group, async_op\), not \(tensor\)"),
    ],
)
def test_a_target_that_changed_is_named_and_nothing_is_replaced(
    path: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects(TARGETS)
    monkeypatch.setitem(versions.NAMES, path, versions.Name((((0, 16), ("tensor",)),)))
    targets = (*TARGETS, Target(path, keep))
    with pytest.raises(InstallError, match=message) as raised, install(targets=targets):
        raise AssertionError("installed all the same")
    assert all(now is was for now, was in zip(objects(TARGETS), before, strict=True))
    # Which Megatron that was, where it is, and what works.
    assert f"found {versions.find_megatron()}" in str(raised.value)
    assert str(Path(megatron.core.__file__).parents[2]) in str(raised.value)
    assert "0.17.1, 0.18.2" in str(raised.value)


def test_every_target_has_a_row_and_every_row_is_a_target() -> None:
    paths = {*(target.path for target in every_target()), *inner_functions()}
    assert sorted(paths) == sorted(versions.NAMES)


def test_installing_twice_is_an_error() -> None:
    with install():
        with pytest.raises(InstallError, match="installed already"), install():
            raise AssertionError("installed twice")
        assert objects(TARGETS)  # the first one still stands
