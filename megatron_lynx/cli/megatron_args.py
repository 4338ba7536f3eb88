"""The job that Megatron's flags describe, wherever they were found (``launch.sources``).

Each flag is planned (it becomes a field of the job), refused (the job is of a kind that lynx does not
plan), named as left out of the figures, or without effect on a plan (``megatron_flags``). Flags and
defaults are those of Megatron's ``training/arguments.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lynx.cli import megatron_flags, memory_flags
from megatron_lynx.cli.launch.sources import Source, from_command, from_file
from megatron_lynx.cli.launch.stand_in import UNKNOWN
from megatron_lynx.cli.launch.words import split, world_size
from megatron_lynx.cli.planned_flags import FLOAT, INT, SWITCH, TEXT
from megatron_lynx.errors import ConfigError

_RECOMPUTE = (
    *("recompute-method", "recompute-num-layers", "recompute-modules", "recompute-activations"),
    *("checkpoint-activations", "activations-checkpoint-method"),
)
_READ = frozenset(
    {
        *_RECOMPUTE,
        *("tokenizer-type", "patch-tokenizer-type", "yaml-cfg", "use-checkpoint-args"),
        "distributed-backend",
    }
)
"""Flags that are read beside others."""

PLANNED = frozenset({*INT, *FLOAT, *TEXT, *SWITCH, *_READ})
"""Every flag that becomes a field of the job, or is one of the methods that are compared."""

_OTHERS = re.compile(r"bert|t5|_vi(t|sion)|dino|_ict|retro|vlm|mimo|multimodal|mamba|hybrid|biencoder")
"""Training scripts of models that are no GPTs."""

_ROTARY = frozenset({"rope", "mrope", "yarn"})
_POSITIONS = frozenset({"learned_absolute", *_ROTARY})
_VOCABULARY = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 32000,
    "LLama3Tokenizer": 128000,
}


@dataclass(slots=True, kw_only=True)
class MegatronArgs:
    """What a launch says.

    ``values`` are fields of the job by name. ``world_size`` is None where nothing says how many ranks
    start, and ``world_reason`` says why. ``refused`` are reasons why the job is not planned, ``unmodelled``
    flags that change what the figures leave out, ``unknown`` flags that the tested Megatron does not have,
    ``ignored`` flags that change no plan, ``left_out`` those that would be refused but for ``--ignore``;
    ``notes`` what was assumed.
    """

    values: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    world_reason: str = ""
    context_parallel: int = 1
    refused: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse what is not planned.

        Raises:
            ConfigError: with the first reason, and the flags of the others.
        """
        if self.refused:
            others = ", ".join(reason.split(":")[0] for reason in self.refused[1:])
            raise ConfigError(self.refused[0] + (f" (also refused: {others})" if others else ""))

    def all_notes(self) -> list[str]:
        """Lines for people: what was assumed, left out, unknown, ignored."""
        found = [*self.notes]
        if self.unmodelled:
            found.append("not in the figures: " + "; ".join(self.unmodelled))
        if self.unknown:
            found.append(
                "not known to Megatron-Core 0.19, taken to change no plan: " + " ".join(self.unknown)
            )
        if self.ignored:
            found.append("flags that change no plan: " + " ".join(self.ignored))
        return found


def read_args(path: str, number: int | None = None, ignore: Collection[str] = ()) -> MegatronArgs:
    """Read ``--from-args FILE``: a script, a list, YAML, a checkpoint, or what was captured.

    ``number`` chooses one of several launches; flags in ``ignore`` are read as if they were not there.

    Raises:
        ConfigError: unreadable, nothing that trains, or a flag whose value does not work.
    """
    return parse_source(from_file(path, number, _worth_saving), ignore)


def read_command(
    words: Sequence[str], number: int | None = None, ignore: Collection[str] = ()
) -> MegatronArgs:
    """Read the command line after ``--``; errors as for ``read_args``."""
    return parse_source(from_command(words, number), ignore)


def _worth_saving(flag: str) -> bool:
    """Whether a flag that a checkpoint saved decides a plan."""
    return flag in PLANNED or flag in megatron_flags.REFUSED


def parse_source(source: Source, ignore: Collection[str] = ()) -> MegatronArgs:
    """Read the words of a launch."""
    launcher, words = split(source.launch.argv)
    found = parse_words(words, source.unset, ignore)
    found.notes = (*source.notes, *found.notes)
    program = launcher[-1].rsplit("/", 1)[-1] if launcher else ""
    if _OTHERS.search(program) and program not in ignore:
        found.refused += (
            f"{program}: trains another kind of model; --ignore {program} plans a GPT of that shape",
        )
    found.world_size, found.world_reason = world_size(source.launch)
    if not launcher:
        found.world_reason = "a list of arguments does not say how many ranks start"
    elif found.world_reason.endswith("has no value") and source.unset:
        found.world_reason += f" (unset in the script: {', '.join(source.unset)})"
    return found


def parse_words(
    words: Sequence[str], unset: Collection[str] = (), ignore: Collection[str] = ()
) -> MegatronArgs:
    """Sort Megatron's flags in ``words``.

    Raises:
        ConfigError: a flag has no value, or one that does not work.
    """
    flags = flags_of(words)
    found = MegatronArgs()
    values = found.values
    dropped = [name for name in flags if name in ignore]
    for name in dropped:
        del flags[name]
    found.left_out = tuple(f"--{name}" for name in dropped if name in megatron_flags.REFUSED)
    for name, given in flags.items():
        if name in INT:
            values[INT[name]] = _one(name, given, int, "24", unset)
        elif name in FLOAT:
            values[FLOAT[name]] = _one(name, given, float, "0.1", unset)
        elif name in TEXT:
            values[TEXT[name]] = _one(name, given, str, "rope", unset)
        elif name in SWITCH:
            key, value = SWITCH[name]
            values[key] = value
        elif name not in _READ:
            _sort(name, given, flags, found, set(dropped))
    if "context-parallel-size" in flags:
        found.context_parallel = _one(
            "context-parallel-size", flags["context-parallel-size"], int, "1", unset
        )
    found.notes = tuple(_complete(values, flags, found))
    if dropped:
        found.notes += ("planned as if these were not there: " + " ".join(f"--{name}" for name in dropped),)
    return found


def _sort(
    name: str, given: Sequence[str], flags: Mapping[str, list[str]], found: MegatronArgs, dropped: set[str]
) -> None:
    """Put a flag that is not planned where it belongs."""
    said = " ".join((f"--{name}", *given))
    table, row = next(iter(megatron_flags.places(name)), ("unknown", ""))
    harmless = bool(given) and given[0] in megatron_flags.HARMLESS.get(name, ())
    main = megatron_flags.COMPANIONS.get(row, "")
    if table == "refused" and not harmless:
        reason = megatron_flags.REFUSED[row].replace("{flag}", name)
        found.refused += (f"{said}: {reason}",)
    elif table == "unmodelled" and not harmless:
        found.unmodelled += (f"{said} ({megatron_flags.UNMODELLED[row]})",)
    elif table == "unknown":
        found.unknown += (f"--{name}",)
    elif table != "companion" or (main not in flags and main not in dropped):
        found.ignored += (f"--{name}",)


def flags_of(words: Sequence[str]) -> dict[str, list[str]]:
    """Flag name -> the words up to the next flag; the last occurrence counts.

    Raises:
        ConfigError: a flag and its value are one word, which no parser would take.
    """
    flags: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            if len(name.split()) > 1:
                raise ConfigError(
                    f"{word!r} is one word, which Megatron would refuse; {word} without quotes works"
                )
            current = [value] if equals else []
            flags[name] = current
        else:
            current.append(word)
    return flags


def _one(
    name: str, given: Sequence[str], read: Callable[[str], Any], example: str, unset: Collection[str]
) -> Any:
    """The single value of a flag."""
    if not given:
        why = f" (unset in the script: {', '.join(sorted(unset))})" if unset else ""
        raise ConfigError(f"--{name} has no value{why}; --{name} {example} works")
    if UNKNOWN in given[0]:
        raise ConfigError(
            f"--{name} comes from a program that was not run; `lynx capture` runs it, and --{name} {example} "
            "beside --from-args sets it"
        )
    try:
        return read(given[0])
    except ValueError as error:
        raise ConfigError(f"--{name} {given[0]!r} is not a number; --{name} {example} works") from error


def _complete(values: dict[str, Any], flags: Mapping[str, list[str]], found: MegatronArgs) -> list[str]:
    """Fill in what Megatron derives or defaults to; returns what had to be assumed."""
    notes = []
    if not values.pop("group_query_attention", False):
        values.pop("num_query_groups", None)
    elif "num_query_groups" not in values:
        values["num_query_groups"] = 1
    unfused = {key: values.pop(key, False) for key in ("no_swiglu_fusion", "no_gelu_fusion")}
    if unfused["no_swiglu_fusion" if values.get("swiglu") else "no_gelu_fusion"]:
        values["fused_activation"] = False
    if not values.get("add_bias_linear", True) and not values.get("swiglu"):
        values["fused_activation"] = False  # as Megatron does: what is fused is the bias
    if flags.get("distributed-backend") == ["gloo"]:
        values["device"] = "cpu"  # training on a CPU, whose kernels save other things
    values.setdefault("dtype_bytes", 4)
    position = values.get("position_embedding_type", "learned_absolute")
    if "window_size" in values:
        values["window_size"] = _window(values["window_size"])
    if position in _ROTARY:
        values["position_embedding_type"] = "yarn" if position == "yarn" else "rope"
    elif position not in _POSITIONS:
        del values["position_embedding_type"]
        found.refused += (
            f"--position-embedding-type {position}: not planned; --ignore position-embedding-type plans "
            "learned ones",
        )
    values["fp16"] = "fp16" in flags
    wanted = values.get("transformer_impl", "transformer_engine")
    memory_flags.complete(values)
    if values["transformer_impl"] != wanted:
        notes.append(
            f"--transformer-impl {wanted} is planned as {values['transformer_impl']} layers of that shape"
        )
    notes += _vocabulary(values, flags)
    notes += _recomputation(values, flags)
    if "use-checkpoint-args" in flags and "num_layers" not in values:
        found.refused += (
            "--use-checkpoint-args: the shape is in a checkpoint; --from-args CHECKPOINT reads it",
        )
    return notes


def _window(text: str) -> tuple[int, int]:
    """A sliding window, as Megatron reads it.

    Raises:
        ConfigError: not two numbers.
    """
    found = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text)
    if found is None:
        raise ConfigError(f"--window-size {text!r} is not two numbers; --window-size 128,0 works")
    return int(found[1]), int(found[2])


def _vocabulary(values: dict[str, Any], flags: Mapping[str, list[str]]) -> list[str]:
    extra = values.pop("extra_vocabulary", 0)
    if "vocab_size" in values:
        return []
    kinds = flags.get("patch-tokenizer-type") or flags.get("tokenizer-type")
    kind = (kinds or ["an unnamed tokenizer"])[0]
    values["vocab_size"] = _VOCABULARY.get(kind, 51200) + extra
    return [f"vocabulary of {kind} taken as {values['vocab_size']}; --vocab-size sets it"]


def _recomputation(values: dict[str, Any], flags: Mapping[str, list[str]]) -> list[str]:
    """What the job recomputes today: one of the rows of a comparison."""
    granularity = values.pop("recompute_granularity", None)
    words = [f"--recompute-granularity {granularity}"] if granularity else []
    for name in _RECOMPUTE:
        words += [" ".join((f"--{name}", *flags[name]))] if name in flags else []
    return [f"{' '.join(words)} is one of the methods that are compared"] if words else []
