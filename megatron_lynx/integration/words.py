"""Errors of planning in the words of training: the flags of the planning commands are not those of a run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from megatron_lynx.errors import LynxError

_TRAININGS = {
    "planner": "--lynx-planner",
    "partition": "--lynx-partition",
    "budget": "--lynx-budget",
    "profile": "--lynx-profile",
    "layout": "--pipeline-model-parallel-layout",
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "dp": "the data-parallel size",
}
"""Flags of the planning commands, and those of a training run that mean the same."""


@contextlib.contextmanager
def in_trainings_words() -> Iterator[None]:
    """Errors of planning, made in here, name the flags of training."""

    def word(match: re.Match[str]) -> str:
        return _TRAININGS[match.group(1)]

    try:
        yield
    except LynxError as error:
        text = re.sub(rf"(?<![\w-])--({'|'.join(_TRAININGS)})(?![\w-])", word, str(error))
        error.args = (text, *error.args[1:])
        raise
