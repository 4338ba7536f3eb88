"""What the job reads and writes: data, tokenizer, checkpoints, report."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megatron_lynx.checkpoint import iteration_folder, latest_iteration, read_checkpoint
from megatron_lynx.cli.health.facts import Check, Facts, Finding, fail, warn
from megatron_lynx.errors import ConfigError
from megatron_lynx.partition.moves import refused_move, refused_schedule

_FILES_OF_TOKENIZER = {
    "GPT2BPETokenizer": ("vocab-file", "merge-file"),
    "BertWordPieceLowerCase": ("vocab-file",),
    "BertWordPieceCase": ("vocab-file",),
    "GPTSentencePieceTokenizer": ("tokenizer-model",),
    "SentencePieceTokenizer": ("tokenizer-model",),
    "Llama2Tokenizer": ("tokenizer-model",),
    "TikTokenizer": ("tokenizer-model",),
    "HuggingFaceTokenizer": ("tokenizer-model",),
}
_DATA = ("data-path", "train-data-path", "valid-data-path", "test-data-path")


def data(facts: Facts) -> Iterator[Finding]:
    """Is there a dataset at each prefix? A loader of the script's own reads what it likes."""
    if facts.text("dataloader-type") == "external":
        return
    given = [name for name in _DATA if facts.has(name)]
    if not given and not any(
        facts.has(n) for n in ("mock-data", "data-args-path", "per-split-data-args-path")
    ):
        yield fail("no dataset is named: --data-path PREFIX, or --mock-data")
    for name in given:
        for word in facts.flags[name]:
            if _is_number(word):  # the weight of the prefix after it
                continue
            for suffix in (".bin", ".idx"):
                path = facts.folder / (word + suffix)
                if not path.is_file():
                    yield fail(
                        f"--{name} {word}: there is no file {path}; the prefix is that of preprocess_data.py"
                    )
                    break


def tokenizer(facts: Facts) -> Iterator[Finding]:
    """Are the tokenizer's files here? Without them it downloads, and compute nodes have no network."""
    kind = facts.text("tokenizer-type")
    if kind is None:
        yield warn(
            "--tokenizer-type is not given: Megatron's default downloads its vocabulary, which "
            "fails without a "
            "network; name it, with its files"
        )
        return
    if kind == "NullTokenizer" and not facts.has("vocab-size"):
        yield fail("--tokenizer-type NullTokenizer needs --vocab-size; --vocab-size 50257 is an example")
    for flag in _FILES_OF_TOKENIZER.get(kind, ()):
        path = facts.path(flag)
        if path is None:
            does = fail if flag == "tokenizer-model" else warn
            yield does(
                f"--tokenizer-type {kind} without --{flag} downloads, or stops; --{flag} FILE works offline"
            )
        elif not path.exists() and (kind != "HuggingFaceTokenizer" or str(path).startswith(("/", "."))):
            yield fail(f"--{flag} {path}: there is no such file")


def written(facts: Facts) -> Iterator[Finding]:
    """Can what the job writes be written?"""
    for flag in ("save", "lynx-report", "tensorboard-dir", "data-cache-path"):
        path = facts.path(flag)
        if path is None:
            continue
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir():
            yield fail(f"--{flag} {path}: {there} is a file; a folder works")
        elif not os.access(there, os.W_OK):
            yield fail(f"--{flag} {path} cannot be written: {there} is closed to this user")
    if facts.has("save-interval") and not facts.has("save"):
        yield fail("--save-interval without --save; --save FOLDER works")


def checkpoint(facts: Facts) -> Iterator[Finding]:
    """The checkpoint that is loaded, against the job."""
    folder = facts.path("load")
    if folder is None:
        return
    flag = f"--load {facts.text('load')}"
    iteration = facts.text("ckpt-step") or latest_iteration(folder)
    if iteration is None:
        if folder != facts.path("save") and not facts.has("exit-on-missing-checkpoint"):
            yield warn(
                f"{flag} holds no checkpoint: training starts from random weights, and says so in "
                "its log only"
            )
        return
    try:
        saved = read_checkpoint(iteration_folder(folder, iteration), flag)
    except ConfigError as error:
        yield fail(str(error))
        return
    args = facts.namespace
    reason = refused_move(saved, args, flag)
    if reason is not None:
        yield fail(reason)
        return
    reason = refused_schedule(saved, _schedule(facts), flag)
    if reason is not None:
        yield fail(reason)
    yield from _random_state(saved.arguments, facts, flag)


def _random_state(before: Namespace, facts: Facts, flag: str) -> Iterator[Finding]:
    """Dropout in a resumed run whose sizes changed."""
    dropout = [facts.text(name) or "0.1" for name in ("hidden-dropout", "attention-dropout")]
    sizes = [getattr(before, f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")]
    now = [facts.size("tensor-model"), facts.size("pipeline-model")]
    if sizes != now and any(float(p) > 0 for p in dropout):
        yield warn(
            f"{flag} was saved with TP {sizes[0]} x PP {sizes[1]}: Megatron leaves its random state "
            "behind, and "
            "dropout draws other masks than in an uninterrupted run"
        )


def _schedule(facts: Facts) -> Namespace:
    """The flags of the learning rate's schedule; None where they are not given."""
    names = ("train-iters", "lr-decay-iters", "global-batch-size")
    values: dict[str, object] = {name.replace("-", "_"): facts.number(name) for name in names}
    values["override_opt_param_scheduler"] = facts.has("override-opt-param-scheduler")
    values["use_checkpoint_opt_param_scheduler"] = facts.has("use-checkpoint-opt-param-scheduler")
    values["no_load_optim"] = facts.has("no-load-optim")
    values["finetune"] = facts.has("finetune")
    return Namespace(**values)


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdigit() and not Path(word + ".idx").exists()


CHECKS: tuple[Check, ...] = (data, tokenizer, written, checkpoint)
