"""Figures that the papers print, as data, each with how far it can be trusted.

Tags: ``V`` read in the paper's own abstract, page or code; ``V2`` read in a secondary source that
says it read the paper; ``M+`` recalled, and confirmed by arithmetic against other figures; ``U``
recalled, unconfirmed. A tag is part of the figure: a comparison against a recalled number says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Tag = Literal["V", "V2", "M+", "U"]

TAGS: dict[Tag, str] = {
    "V": "read in the paper's abstract or page",
    "V2": "read in a secondary source that says it read the paper",
    "M+": "recalled, then confirmed by arithmetic against other printed figures",
    "U": "recalled, unconfirmed",
}


class Figure(NamedTuple):
    """A printed number and its tag."""

    value: float
    tag: Tag

    def __str__(self) -> str:
        """The number with its tag: ``7.7 [V2]``."""
        return f"{self.value:g} [{self.tag}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A row of Table 4 of arXiv 2205.05198: one layer of the 22B model, times in milliseconds.

    ``sequence_parallel`` and ``method`` say how to run it; ``total`` is forward plus backward with
    its recomputation.
    """

    name: str
    sequence_parallel: bool
    method: Literal["none", "full-uniform-1", "selective"]
    forward: Figure
    backward: Figure
    total: Figure
    overhead_percent: Figure | None = None


TABLE_4 = (
    LayerRow(
        name="baseline, no recomputation",
        sequence_parallel=False,
        method="none",
        forward=Figure(7.7, "V2"),
        backward=Figure(11.9, "V2"),
        total=Figure(19.6, "V2"),
    ),
    LayerRow(
        name="sequence parallelism",
        sequence_parallel=True,
        method="none",
        forward=Figure(7.2, "U"),
        backward=Figure(11.8, "U"),
        total=Figure(19.0, "V2"),
        overhead_percent=Figure(-3, "V2"),
    ),
    LayerRow(
        name="full recomputation",
        sequence_parallel=False,
        method="full-uniform-1",
        forward=Figure(7.7, "V2"),
        backward=Figure(19.5, "V2"),
        total=Figure(27.2, "V2"),
        overhead_percent=Figure(39, "V2"),
    ),
    LayerRow(
        name="selective recomputation",
        sequence_parallel=False,
        method="selective",
        forward=Figure(7.7, "V2"),
        backward=Figure(13.2, "V2"),
        total=Figure(20.9, "V2"),
        overhead_percent=Figure(7, "V2"),
    ),
    LayerRow(
        name="selective + sequence parallelism",
        sequence_parallel=True,
        method="selective",
        forward=Figure(7.2, "U"),
        backward=Figure(13.1, "U"),
        total=Figure(20.3, "V2"),
        overhead_percent=Figure(4, "V2"),
    ),
)
"""The bracketed figures of the notes are recalled; their sums are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A row of Tables 3 and 5 of arXiv 2205.05198: a model on A100s with 80 GB.

    ``vpp`` is the number of chunks of the interleaved schedule (1: plain 1F1B). ``full_s`` is the
    step with full recomputation, ``present_s`` with selective recomputation and sequence
    parallelism. ``mfu_percent`` is that of the latter.
    """

    name: str
    model: str
    tp: int
    pp: int
    vpp: int
    dp: int
    micro_batch_size: int
    global_batch_size: int
    full_s: Figure | None
    present_s: Figure
    gain_percent: Figure | None
    mfu_percent: Figure

    @property
    def gpus(self) -> int:
        """Devices of the run."""
        return self.tp * self.pp * self.dp


MODEL_ROWS = (
    ModelRow(
        name="22B",
        model="gpt-22b",
        tp=8,
        pp=1,
        vpp=1,
        dp=1,
        micro_batch_size=4,
        global_batch_size=4,
        full_s=Figure(1.42, "M+"),
        present_s=Figure(1.10, "M+"),
        gain_percent=Figure(29.0, "V2"),
        mfu_percent=Figure(41.5, "U"),
    ),
    ModelRow(
        name="175B",
        model="gpt-175b",
        tp=8,
        pp=8,
        vpp=3,
        dp=1,
        micro_batch_size=1,
        global_batch_size=64,
        full_s=Figure(18.13, "M+"),
        present_s=Figure(13.75, "M+"),
        gain_percent=Figure(31.8, "V2"),
        mfu_percent=Figure(51.4, "U"),
    ),
    ModelRow(
        name="530B",
        model="gpt-530b",
        tp=8,
        pp=35,
        vpp=3,
        dp=1,
        micro_batch_size=1,
        global_batch_size=280,
        full_s=Figure(49.05, "M+"),
        present_s=Figure(37.83, "M+"),
        gain_percent=Figure(29.7, "V2"),
        mfu_percent=Figure(56.0, "V2"),
    ),
    ModelRow(
        name="1T",
        model="gpt-1t",
        tp=8,
        pp=64,
        vpp=1,
        dp=1,
        micro_batch_size=1,
        global_batch_size=512,
        full_s=Figure(94.42, "M+"),
        present_s=Figure(71.49, "M+"),
        gain_percent=Figure(32.1, "V2"),
        mfu_percent=Figure(56.3, "V2"),
    ),
    ModelRow(
        name="530B, 8-way data parallel",
        model="gpt-530b",
        tp=8,
        pp=35,
        vpp=3,
        dp=8,
        micro_batch_size=1,
        global_batch_size=2240,
        full_s=None,
        present_s=Figure(39.15, "M+"),
        gain_percent=None,
        mfu_percent=Figure(54.2, "V"),
    ),
)
"""The seconds are recalled; they reproduce the printed gains (V2) to 0.1 % and the printed MFU to
0.2 points, which is the check that they have passed."""

SEQUENCE = 2048
"""Sequence length of all runs of arXiv 2205.05198."""

SELECTIVE_SAVINGS = {
    "gpt-175b": (Figure(70, "V2"), Figure(2.7, "V2")),
    "gpt-530b": (Figure(65, "V2"), Figure(1.6, "V2")),
}
"""What selective recomputation saves of a layer's bytes, and the FLOPs it costs, in percent."""

LYNX_UP_TO = Figure(1.37, "V")
"""arXiv 2406.08756 v4: speedup over prior recomputation, GPT 1.3B-23B, "up to"."""

LYNX_RANGE = (Figure(1.02, "V"), Figure(1.53, "V"))
"""arXiv 2406.08756 v1: speedups over prior recomputation, GPT 1.3B-20B; another evaluation."""

HEU_SEARCH_S = Figure(0.16, "V")
"""arXiv 2406.08756 v1: average search time of HEU, 99 % less than OPT's."""
