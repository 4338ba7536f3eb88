"""Put the replaced names in place, and take them out again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_lynx.errors import InstallError
from megatron_lynx.integration import versions
from megatron_lynx.integration.targets import TARGETS, Target
from megatron_lynx.integration.windows import Hooks

_installed = False


@contextmanager
def install(hooks: Hooks | None = None, targets: Sequence[Target] = TARGETS) -> Iterator[Hooks]:
    """Replace every target until the block ends; then each is the original object again.

    Nothing changes in how Megatron behaves until ``hooks.executor`` is set.

    Raises:
        InstallError: a target is missing or has changed, or megatron_lynx is installed already.
            Nothing has been replaced then.
    """
    global _installed
    if _installed:
        raise InstallError("megatron_lynx is installed already; leave the first install() block before")
    hooks = hooks or Hooks()
    found = [(target, *target.locate()) for target in targets if versions.belongs(target.path)]
    _installed = True
    try:
        for target, module, name, original in found:
            setattr(module, name, target.replace(original, hooks))
        yield hooks
    finally:
        for _, module, name, original in found:
            setattr(module, name, original)
        _installed = False
