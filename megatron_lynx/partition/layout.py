"""Megatron's ``--pipeline-model-parallel-layout``: strings such as ``Et*3|(t*4|)*6t*2L``.

Letters are layers: ``E`` the embedding, ``t`` a transformer layer, ``m`` a multi-token-prediction
layer, ``L`` the loss with the output layer. ``|`` separates stages, which may be empty; ``x*n``
repeats a letter, ``(...)*n`` a group without parentheses inside; commas mean nothing. Stages are
listed chunk by chunk: stage number ``chunk * pp + rank``.

Megatron builds the embedding and the output layer by a rank's position, not by the layout, so an
``E`` outside the first stage passes its checks and is then built elsewhere. A ``Layout`` can only
hold what Megatron accepts and puts where it is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_lynx.errors import ConfigError

FLAG = "--pipeline-model-parallel-layout"
LETTERS = "EtmL"
LONGEST = 1_000_000
"""Letters of an unrolled layout; a longer one is a mistake in a factor."""

_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_LETTER = re.compile(r"(.)\*(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The stages of a pipeline of ``pp`` ranks, chunk by chunk, each a string of letters.

    Raises:
        ConfigError: Megatron would refuse it, or build a layer elsewhere than it says.
    """

    pp: int
    stages: tuple[str, ...]

    def __post_init__(self) -> None:
        for number, stage in enumerate(self.stages):
            for letter in stage:
                if letter not in LETTERS:
                    raise ConfigError(
                        f"{FLAG}: {letter!r} in stage {number} is none of E (embedding), t (layer), "
                        "m (multi-token prediction) and L (loss); Et|tL works for two layers"
                    )
        if self.pp < 1 or not self.stages or len(self.stages) % self.pp:
            raise ConfigError(
                f"{FLAG} has {len(self.stages)} stages, which --pp {self.pp} does not divide; "
                f"--pp {len(self.stages) or 1} works"
            )
        self._check_ends()
        self._check_prediction_layers()

    def _check_ends(self) -> None:
        """The embedding begins the first stage, the loss ends the last; there is one of each."""
        flat = "".join(self.stages)
        if flat.count("E") != 1 or not self.stages[0].startswith("E"):
            raise ConfigError(
                f"{FLAG} {self}: the first stage must begin with E, the only one; Megatron builds the "
                "embedding there whatever the layout says; Et|tL works for two layers"
            )
        if flat.count("L") != 1 or not self.stages[-1].endswith("L"):
            raise ConfigError(
                f"{FLAG} {self}: the last stage must end with L, the only one; Megatron builds the "
                "output layer there whatever the layout says; Et|tL works for two layers"
            )

    def _check_prediction_layers(self) -> None:
        """Every ``m`` comes after every ``t``, and all are in one stage of the last chunk."""
        flat = "".join(self.stages)
        homes = [number for number, stage in enumerate(self.stages) if "m" in stage]
        if not homes:
            return
        if "t" in flat[flat.index("m") :]:
            raise ConfigError(f"{FLAG} {self}: m must come after every t; Et|tmL works")
        if len(homes) > 1 or homes[0] < len(self.stages) - self.pp:
            raise ConfigError(
                f"{FLAG} {self}: all m must be in one stage of the last model chunk; Et|tmL works"
            )

    @classmethod
    def from_counts(cls, counts: Sequence[int], pp: int, predictions: int = 0) -> Layout:
        """The layout with ``counts`` transformer layers in its stages, chunk by chunk, and so many layers of
        multi-token prediction in the last one."""
        stages = ["t" * count for count in counts]
        if stages:
            stages[0] = "E" + stages[0]
            stages[-1] += "m" * predictions + "L"
        return cls(pp=pp, stages=tuple(stages))

    @property
    def vpp(self) -> int:
        """Model chunks per rank."""
        return len(self.stages) // self.pp

    @property
    def counts(self) -> tuple[int, ...]:
        """Transformer layers of each stage, chunk by chunk."""
        return tuple(stage.count("t") for stage in self.stages)

    @property
    def num_layers(self) -> int:
        """Transformer layers in all."""
        return sum(self.counts)

    def chunks(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Global indices of the transformer layers of ``rank``, one tuple per model chunk."""
        return chunks_of(self.counts, self.pp, rank)

    def check_num_layers(self, num_layers: int) -> None:
        """Check the layout against ``--num-layers``.

        Raises:
            ConfigError: the number of layers differs.
        """
        if self.num_layers != num_layers:
            raise ConfigError(
                f"{FLAG} {self} has {self.num_layers} layers, but --num-layers is {num_layers}; "
                f"--num-layers {self.num_layers} works"
            )

    def __str__(self) -> str:
        """The string for Megatron's flag; ``parse_layout`` reads it back."""
        pieces = []
        for stage, same in groupby(self.stages[:-1]):
            text, times = _letters(stage) + "|", len(list(same))
            group = f"({text})*{times}"
            pieces.append(group if len(group) < len(text) * times else text * times)
        return "".join([*pieces, _letters(self.stages[-1])])


def chunks_of(counts: Sequence[int], pp: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Global layer indices of ``rank``, per chunk, when stages chunk by chunk hold ``counts``."""
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(
        tuple(range(starts[stage], starts[stage] + counts[stage])) for stage in range(rank, len(counts), pp)
    )


def _letters(stage: str) -> str:
    """A stage with runs of a letter as ``t*4`` where that is shorter than the run."""
    words = []
    for letter, same in groupby(stage):
        times = len(list(same))
        words.append(f"{letter}*{times}" if times > 3 else letter * times)
    return "".join(words)


def _unroll(pattern: re.Pattern[str], text: str) -> str:
    """Replace each repetition by what it stands for, refusing a factor that is a mistake."""
    length = len(text)
    for match in pattern.finditer(text):
        times = int(match.group(2)) if len(match.group(2)) < 10 else LONGEST
        length += len(match.group(1)) * times
        if length > LONGEST:
            raise ConfigError(f"{FLAG}: {match.group(0)!r} makes more than {LONGEST} layers; t*24 works")
    return pattern.sub(lambda match: match.group(1) * int(match.group(2)), text)


def parse_stages(text: str) -> tuple[str, ...]:
    """Unroll a layout string into its stages, without judging them.

    Groups are unrolled first, then letters, once each, as Megatron does; what is left of a nested
    group or of ``t*2*3`` is then no letter.
    """
    flat = _unroll(_LETTER, _unroll(_GROUP, text.replace(",", "")))
    return tuple(flat.split("|"))


def parse_layout(text: str, pp: int) -> Layout:
    """Read a layout string for a pipeline of ``pp`` ranks.

    Raises:
        ConfigError: the syntax is wrong, or Megatron would refuse or misplace it.
    """
    return Layout(pp=pp, stages=parse_stages(text))
