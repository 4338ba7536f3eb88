"""What differs between versions of Megatron: the one table of names and signatures, and who is here.

Nothing is imported to find out which Megatron there is: a broken one must be named too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_lynx.errors import InstallError

Parameters = tuple[str, ...]

TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.19.2", "0.20.0")
"""Versions of megatron-core whose training was compared with stock's: bit for bit by the tests from wheels
(0.16.1 by the core API alone, 0.17.1, 0.18.2, 0.19.2); by hand from upstream's checkouts 0.19.1, and
0.20.0, its main branch (bit for bit by the core API; in the trainer by the digits of the log)."""

TESTED_TORCH = "2.8 to 2.14"

OLDEST, NEWEST = (0, 16), (0, 20)
"""Major and minor version of the oldest and the newest Megatron that were tested."""

_P2P = (
    "tensor_send_prev",
    "tensor_recv_prev",
    "tensor_send_next",
    "tensor_recv_next",
    "group",
    "prev_pipeline_rank",
    "next_pipeline_rank",
)
_GATHER = ("output_tensor", "input_tensor", "group", "async_op")
_SCATTER = ("output", "input", "op", "group", "async_op")
_LAYERS = "megatron.core.tensor_parallel.layers"
_PARSE = ("extra_args_provider", "ignore_unknown_args")
_VALIDATE = ("args", "defaults")


@dataclass(frozen=True, slots=True)
class Name:
    """A name that is replaced, and the parameters it has from which version on.

    ``until`` is the first version that does not have it any more.
    """

    since: tuple[tuple[tuple[int, int], Parameters], ...]
    until: tuple[int, int] | None = None


def _always(parameters: Parameters, until: tuple[int, int] | None = None) -> Name:
    return Name(((OLDEST, parameters),), until)


NAMES: dict[str, Name] = {
    "torch.distributed.all_reduce": _always(("tensor", "op", "group", "async_op")),
    "megatron.core.tensor_parallel.mappings.dist_all_gather_func": _always(_GATHER),
    "megatron.core.tensor_parallel.mappings.dist_reduce_scatter_func": _always(_SCATTER),
    "megatron.core.tensor_parallel.layers.dist_all_gather_func": _always(_GATHER),
    "megatron.core.tensor_parallel.layers.dist_reduce_scatter_func": _always(_SCATTER),
    "torch.distributed.all_gather_into_tensor": _always(_GATHER),
    "torch.distributed.reduce_scatter_tensor": _always(_SCATTER),
    f"{_LAYERS}.LinearWithGradAccumulationAndAsyncCommunication": _always(("args", "kwargs")),
    "transformer_engine.pytorch.module.layernorm_linear.apply_normalization": _always(
        (
            *("inputmat", "ln_out", "ln_weight", "ln_bias", "eps", "output_quantizer", "output_dtype"),
            *("normalization", "fwd_ln_sm_margin", "zero_centered_gamma"),
        )
    ),
    "megatron.core.pipeline_parallel.p2p_communication._batched_p2p_ops": _always(_P2P),
    "megatron.core.pipeline_parallel.p2p_communication._p2p_ops": _always(_P2P),
    "megatron.core.pipeline_parallel.schedules.P2PCommunicator": _always(("pp_group", "config")),
    "megatron.training.training.setup_model_and_optimizer": Name(
        (
            (OLDEST, ("model_provider_func", "model_type", "checkpointing_context")),
            (
                (0, 19),
                (
                    "model_type",
                    "model_provider_func",
                    "checkpointing_context",
                    "cfg_container",
                    "pg_collection",
                ),
            ),
        )
    ),
    "megatron.training.training.get_forward_backward_func": Name(
        (
            (OLDEST, ("pp_size", "vp_size")),
            ((0, 19), ("pp_size", "vp_size", "schedule_pg_collection")),
        )
    ),
    "megatron.training.arguments.parse_args": _always(_PARSE),
    "megatron.training.arguments.validate_args": _always(_VALIDATE),
    # Up to 0.17 the trainer parses, by names of its own.
    "megatron.training.initialize.parse_args": _always(_PARSE, until=(0, 18)),
    "megatron.training.initialize.validate_args": _always(_VALIDATE, until=(0, 18)),
}
"""Dotted path, where the name is used -> its parameters by version."""

_SENT_BEFORE_FREED_SINCE = (0, 18)


@dataclass(frozen=True, slots=True)
class Megatron:
    """The Megatron that Python finds: version, the folder of ``megatron.core``, that of the trainer."""

    version: str
    core: Path
    training: Path | None

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def tested(self) -> bool:
        """Whether just this version was tested."""
        return self.version in TESTED

    def __str__(self) -> str:
        return f"megatron-core {self.version} in {self.core.parent.parent}"


def find_megatron() -> Megatron | None:
    """Which Megatron ``import megatron.core`` would load, without importing it; None if there is none.

    Raises:
        InstallError: there is one whose version cannot be read.
    """
    core, training = _folder("megatron.core"), _folder("megatron.training")
    return None if core is None else Megatron(version_in(core / "package_info.py"), core, training)


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # blocked: its place in sys.modules holds None
        return False


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the parent
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def version_in(path: Path) -> str:
    """The version that a ``package_info.py`` states."""
    try:
        statements = ast.parse(path.read_text("utf-8")).body
        values = {
            target.id: ast.literal_eval(statement.value)
            for statement in statements
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}"
    except (OSError, SyntaxError, ValueError, KeyError) as error:
        raise InstallError(f"{path} does not say which Megatron-Core this is: {error!r}") from error


def tested_versions() -> str:
    """What was tested, in words."""
    return f"megatron-core {', '.join(TESTED)} and torch {TESTED_TORCH} were tested"


def summary() -> str:
    """One line for ``lynx --version`` and for errors: what was found, where, and what was tested."""
    found = find_megatron()
    return f"{found or 'no megatron-core was found'}; {tested_versions()}"


def require_megatron(*, trainer: bool = False) -> Megatron:
    """Check that the running half can be imported at all, before anything else imports it.

    Raises:
        InstallError: says what is missing or broken, where, and what works.
    """
    if not _is_there("torch"):
        raise InstallError(
            "training needs torch, which is not installed: `pip install torch`, then megatron-core; "
            f"planning works without; {tested_versions()}"
        )
    found = find_megatron()
    if found is None:
        raise InstallError(
            "training needs Megatron-Core, which is not installed: `pip install megatron-core` or "
            f"PYTHONPATH=PATH/TO/Megatron-LM works; {tested_versions()}"
        )
    if found.release < OLDEST:
        raise InstallError(f"{found} is older than what works; {tested_versions()}")
    if trainer:
        _check_trainer(found)
    _import("megatron.core", found)
    if trainer:
        _import("megatron.training", found)
    return found


def _check_trainer(found: Megatron) -> None:
    """The trainer must be there, and of the same Megatron: ``megatron`` is a namespace package, whose
    parts Python takes from wherever it finds each first."""
    if found.training is None:
        raise InstallError(
            f"{found} has no trainer (megatron.training): the wheels have one from 0.17 on; "
            "PYTHONPATH=PATH/TO/Megatron-LM works"
        )
    if found.training.parent.resolve() != found.core.parent.resolve():
        raise InstallError(
            f"two Megatrons are mixed: megatron.core {found.version} comes from {found.core.parent.parent}, "
            f"megatron.training from {found.training.parent.parent}; "
            f"PYTHONPATH={found.training.parent.parent} before all else works, or uninstall one"
        )


def _import(module: str, found: Megatron) -> None:
    try:
        importlib.import_module(module)
    except InstallError:
        raise
    except Exception as error:  # whatever a broken package raises, the user needs its name
        culprit = _innermost_of("transformer_engine", error.__traceback__)
        if culprit is not None:
            raise InstallError(
                f"the package transformer-engine in {culprit} cannot be imported, and {module} imports it: "
                f"{_first_sentence(error)}; `pip uninstall transformer-engine` works, or install "
                "`transformer-engine[pytorch]`"
            ) from error
        missing = f"; `pip install {error.name}` works" if isinstance(error, ModuleNotFoundError) else ""
        raise InstallError(
            f"import {module} fails: {type(error).__name__}: {_first_sentence(error)}{missing}; "
            f"found {found}; {tested_versions()}"
        ) from error


def _innermost_of(package: str, traceback: TracebackType | None) -> Path | None:
    """The folder that holds ``package`` if one of its files is on the way to an error."""
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").split(".")[0] == package:
            path = Path(traceback.tb_frame.f_code.co_filename)
            return next((p.parent for p in path.parents if p.name == package), path.parent)
        traceback = traceback.tb_next
    return None


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0]


def belongs(path: str) -> bool:
    """Whether the Megatron at hand is to have the name at ``path``."""
    name, found = NAMES[path], find_megatron()
    return name.until is None or found is None or found.release < name.until


def check_parameters(path: str, found: Callable[..., Any]) -> None:
    """Compare what stands at ``path`` with the table.

    Raises:
        InstallError: its parameters are none of those that were tested.
    """
    parameters = tuple(inspect.signature(found).parameters)
    known = [parameters for _, parameters in NAMES[path].since]
    if parameters not in known:
        tested = " or ".join(f"({', '.join(one)})" for one in known)
        raise InstallError(f"{path} takes ({', '.join(parameters)}), not {tested}; found {summary()}")


def untested_note() -> str | None:
    """A line to say where every name matched although just this version was not tested; else None."""
    found = find_megatron()
    if found is None or found.tested:
        return None
    return (
        f"{found} was not tested; every name that is replaced is as in those that were ({', '.join(TESTED)})"
    )


def frees_while_sending() -> bool:
    """Whether stock's interleaved schedule, with overlapped transfers, frees outputs that it is still
    sending: below 0.18, where losses then differ from run to run or are NaN."""
    found = find_megatron()
    return found is not None and found.release < _SENT_BEFORE_FREED_SINCE
