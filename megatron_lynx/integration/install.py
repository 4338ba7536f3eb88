"""Put the replaced names in place, and take them out again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_lynx.errors import InstallError
from megatron_lynx.integration import versions
from megatron_lynx.integration.targets import TARGETS, Target, inner_targets
from megatron_lynx.integration.windows import Hooks

_installed: Hooks | None = None


@contextmanager
def install(hooks: Hooks | None = None, targets: Sequence[Target] = TARGETS) -> Iterator[Hooks]:
    """Replace every target until the block ends; then each is the original object again.

    Nothing changes in how Megatron behaves until ``hooks.executor`` is set.

    Raises:
        InstallError: a target is missing or has changed, or megatron_lynx is installed already.
            Nothing has been replaced then.
    """
    global _installed
    if _installed is not None:
        raise InstallError("megatron_lynx is installed already; leave the first install() block before")
    hooks = hooks or Hooks()
    wanted = (*(target for target in targets if versions.belongs(target.path)), *inner_targets())
    found = [(target, *target.locate()) for target in wanted]
    _installed = hooks
    try:
        for target, module, name, original in found:
            setattr(module, name, target.replace(original, hooks))
        yield hooks
    finally:
        for _, module, name, original in found:
            setattr(module, name, original)
        _installed = None


@contextmanager
def watching(watcher: Any) -> Iterator[None]:
    """Inside, functions that run inside parts of layers tell ``watcher`` of it, where megatron_lynx is
    installed."""
    if _installed is None:
        yield
        return
    before, _installed.watcher = _installed.watcher, watcher
    try:
        yield
    finally:
        _installed.watcher = before
