"""Leaves a layer's own collectives out, so that its compute is measured alone."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron_lynx.integration.targets import TARGETS
from megatron_lynx.integration.windows import windowed_collective


class _Done:
    """The handle of a collective that was left out."""

    def wait(self, *_: Any, **__: Any) -> None:
        """Nothing to wait for."""


@contextlib.contextmanager
def silent_collectives(group: Any) -> Iterator[None]:
    """Inside, collectives over the layers' tensor-parallel ``group`` do nothing. Those over another, such as
    attention's over context-parallel ranks, belong to the part that runs them."""
    places = [target.path.rpartition(".") for target in TARGETS if target.replace is windowed_collective]
    names = [
        (module := importlib.import_module(path), name, getattr(module, name)) for path, _, name in places
    ]
    for module, name, original in names:
        setattr(module, name, _silent(original, group))
    try:
        yield
    finally:
        for module, name, original in names:
            setattr(module, name, original)


def _silent(original: Callable[..., Any], group: Any) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is not group:
            return original(*args, **kwargs)
        return _Done() if kwargs.get("async_op") else None

    return collective
