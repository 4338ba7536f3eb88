"""The map of the code as tests: who imports whom, what loads torch, how long a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lynx.layers import KINDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_lynx"

BASE = {"errors", "units"}
NOUNS = BASE | {
    *("spec", "hardware", "presets", "graph", "layers", "cost", "estimate", "footprint", "job"),
    *("schedule", "plan", "checkpoint"),
}
VERBS = {"planner", "partition", "simulator"}
ON_RANKS = NOUNS | {"runtime", "profiler", "integration", "search"}
"""What may be used where Megatron trains."""

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "spec": BASE,
    "hardware": BASE,
    "presets": BASE | {"spec", "hardware"},
    "checkpoint": BASE,
    "graph": BASE,
    "layers": BASE | {"graph", "spec"},
    "schedule": BASE | {"spec"},
    "plan": BASE | {"graph", "schedule", "spec"},
    "cost": BASE | {"graph", "hardware", "plan", "layers", "spec"},
    "estimate": BASE | {"cost", "layers", "graph", "hardware", "spec"},
    "footprint": BASE | {"estimate", "graph", "hardware", "layers", "spec"},
    "job": NOUNS - {"presets"},
    "planner": NOUNS,
    "partition": NOUNS,
    "simulator": NOUNS,
    "profiler": NOUNS,
    "runtime": NOUNS,
    "search": NOUNS | VERBS,
    "reproduction": NOUNS | VERBS | {"search"},
    "integration": (ON_RANKS - {"integration"})
    | {
        *("integration.cpu", "integration.measuring", "partition.layout", "partition.moves", "pretrain_gpt"),
    },
    "integration.cpu": BASE,
    "integration.measuring": ON_RANKS | {"integration.cpu"},
    "integration.benching": ON_RANKS | VERBS | {"integration.cpu", "integration.measuring"},
    "pretrain_gpt": NOUNS | {"integration", "search"},
    "cli": NOUNS
    | VERBS
    | {
        *("search", "profiler", "integration", "integration.measuring", "pretrain_gpt", "reproduction"),
    },
    "__main__": {"cli"},
    "__init__": NOUNS | VERBS | {"search"},
}
"""Module or package -> what it may import of megatron_lynx; its own package is always allowed."""

HEAVY = {
    "torch": {"profiler", "runtime", "integration", "pretrain_gpt"},
    "megatron": {"integration", "pretrain_gpt"},
    "rich": {"cli"},
    "numpy": {"planner", "partition", "simulator", "search", "runtime", "integration", "profiler"},
    "highspy": {"planner"},
}
"""Third-party package -> who may import it. Nothing else but the standard library is used."""

RANK_SUFFIX = "_job.py"
"""Files of ``cli`` that run on the ranks of a job that a command starts; they may use torch."""

PURE = NOUNS | VERBS | {"search", "reproduction", "cli"}
"""What must work without torch."""

LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
"""Exceptions from the caps; rows may be removed, not added."""

FILE_CAP, FUNCTION_CAP, NOUNS_CAP = 400, 60, 3000

SOURCES = sorted(PACKAGE.rglob("*.py"))


def place(path: Path) -> str:
    """The root module or package that a file belongs to; a folder with a row of its own comes first."""
    inside = path.relative_to(PACKAGE)
    if len(inside.parts) == 1:
        return inside.stem
    return next((row for row in (".".join(inside.parts[:2]),) if row in ALLOWED), inside.parts[0])


def row_of(name: str) -> set[str]:
    """The rows of the table that an imported dotted name (without the package's own) may fall under."""
    parts = name.split(".")
    dotted = ".".join(parts[:2])
    return {dotted} if dotted in ALLOWED else {parts[0], dotted}


def imports(path: Path, *, nested: bool) -> Iterator[str]:
    """Dotted names that a file imports; at module level only, unless ``nested``."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes = ast.walk(tree) if nested else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "megatron_lynx":
                yield from (f"megatron_lynx.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_table(path: Path) -> None:
    here = place(path)
    allowed = ALLOWED[here] | {here}
    for name in imports(path, nested=True):
        top, *rest = name.split(".")
        if top == "megatron_lynx":
            if not rest or rest[0] == "__version__":
                continue
            assert row_of(".".join(rest)) & allowed, f"{here} may not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in HEAVY, f"{name} is not a known dependency"
            on_a_rank = here == "cli" and path.name.endswith(RANK_SUFFIX)
            assert here.split(".")[0] in HEAVY[top] or on_a_rank, f"{here} may not import {top}"


def test_only_one_file_imports_the_solver() -> None:
    users = {str(p.relative_to(PACKAGE)) for p in SOURCES if "highspy" in set(imports(p, nested=True))}
    assert users <= {"planner/milp.py"}


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if place(p).split(".")[0] not in {"cli", "integration", "pretrain_gpt"}],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_import_hides_in_a_function(path: Path) -> None:
    assert sorted(imports(path, nested=True)) == sorted(imports(path, nested=False))


def test_verbs_and_table_are_complete() -> None:
    places = {place(path) for path in SOURCES}
    assert places <= set(ALLOWED)


def pure_modules() -> list[str]:
    """Every module that must load without torch."""
    found = ["megatron_lynx"]
    for path in SOURCES:
        if place(path) in PURE and not path.name.endswith(RANK_SUFFIX):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts).removesuffix(".__init__"))
    return found


def test_pure_half_loads_no_torch_and_changes_nothing() -> None:
    """One process imports all of the pure half; nothing heavy may come along, nothing be printed."""
    code = (
        "import importlib, logging, os, sys\n"
        "def state():\n"
        "    root = logging.root\n"
        "    return dict(os.environ), root.level, root.handlers[:]\n"
        "before = state()\n"
        f"for name in {pure_modules()!r}: importlib.import_module(name)\n"
        "assert before == state()\n"
        "heavy = {'torch', 'megatron', 'transformer_engine', 'apex'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_import_of_the_package_alone_is_light() -> None:
    code = (
        "import sys, megatron_lynx\n"
        "assert not {'torch', 'megatron', 'highspy', 'rich'} & set(sys.modules)\n"
        "assert list(megatron_lynx.__all__) == sorted(megatron_lynx.__all__)\n"
        "assert all(hasattr(megatron_lynx, name) for name in megatron_lynx.__all__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


REGIONS_ELSEWHERE = {"reproduction/activations.py"}
"""Files outside of ``layers`` that name regions: it sets a paper's table beside them, item by item. Rows may
be removed, not added."""


def strings(tree: ast.Module) -> Iterator[str]:
    """Every string of a file that is not a docstring."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    loose = {id(one.value) for body in bodies for one in body if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loose:
            yield node.value


def regions_named(path: Path) -> set[str]:
    """Regions of any kind of layer that stand in a file's strings: as a word, or, where a region is
    called by a plain word, as the whole string or in a plan's own notation."""
    names = {name for kind in KINDS.values() for name in kind.names}
    found = set()
    for text in strings(ast.parse(path.read_text("utf-8"))):
        if text.startswith("model."):  # a key of a configuration file
            continue
        for name in names:
            form = rf"\b{name}\b" if "_" in name else rf"(^|[.:]){name}($|[.:=])"
            if re.search(form, text):
                found.add(name)
    return found


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if place(p) != "layers"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_regions_are_named_in_their_kinds_alone(path: Path) -> None:
    assert not regions_named(path) or str(path.relative_to(PACKAGE)) in REGIONS_ELSEWHERE


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function of a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    assert len(path.read_text("utf-8").splitlines()) <= LONG_FILES.get(name, FILE_CAP)
    for function, lines in functions(path):
        assert lines <= LONG_FUNCTIONS.get(f"{name}:{function}", FUNCTION_CAP), function


def test_exceptions_are_still_needed() -> None:
    for name, cap in LONG_FILES.items():
        assert FILE_CAP < len((PACKAGE / name).read_text("utf-8").splitlines()) <= cap
    for row, cap in LONG_FUNCTIONS.items():
        name, _, function = row.partition(":")
        assert FUNCTION_CAP < dict(functions(PACKAGE / name))[function] <= cap


def test_nouns_can_be_read_in_an_afternoon() -> None:
    lines = sum(len(p.read_text("utf-8").splitlines()) for p in SOURCES if place(p) in NOUNS - {"layers"})
    assert lines <= NOUNS_CAP


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_line_prints(path: Path) -> None:
    """Outside of ``cli`` only a script's own ``main`` may print."""
    if place(path) in {"cli", "pretrain_gpt"}:
        return
    tree = ast.parse(path.read_text("utf-8"))
    entry = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    allowed = {id(node) for function in entry for node in ast.walk(function)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in allowed]
    assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


def asserting(tree: ast.Module) -> set[str]:
    """Functions of a test file that assert: themselves, or by calling one that does.

    Helpers from elsewhere in the tests, and names that say so, count as asserting.
    """
    known = {"raises", "warns"}
    bodies = {n.name: list(ast.walk(n)) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            known |= {alias.asname or alias.name for alias in node.names}
    while True:
        found = set(known)
        for name, body in bodies.items():
            called = [n.func for n in body if isinstance(n, ast.Call)]
            names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in called}
            said = any(n.startswith(("check_", "assert_")) for n in names)
            if said or names & found or any(isinstance(n, ast.Assert) for n in body):
                found.add(name)
        if found == known:
            return found
        known = found


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.name)
def test_every_test_asserts_something(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    tests = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
    assert tests - asserting(tree) == set()
