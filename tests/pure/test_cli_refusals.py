"""What the ``lynx`` command refuses: one line, exit code 2, the flag, the value, a value that works."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from megatron_lynx.cli.main import COMMANDS
from tests.support.command import SMALL, TIGHT, Captured, lynx

NONSENSE: list[tuple[list[str], tuple[str, ...]]] = [
    (["plan", *SMALL, "--tp", "3"], ("--num-attention-heads 16", "--tp 3", "--tp 2 works")),
    (["plan", *SMALL, "--num-layers", "99999999996"], ("--num-layers: 99999999996 layers", "10000 works")),
    (["plan", *SMALL, "--global-batch-size", "1000000000"], ("--global-batch-size: ", "100000 works")),
    (["plan", *SMALL, "--budget", "-3GiB"], ("--budget '-3GiB'", "32GiB")),
    (["plan", *SMALL, "--num-layers", "0"], ("--num-layers 0", "at least 1")),
    (["plan", *SMALL, "--num-layers", "16", "--vpp", "3"], ("--vpp 3", "--num-layers 16", "--vpp 2 works")),
    (["plan", *SMALL, "--vpp", "3"], ("--num-layers 8", "--vpp 3", "--pp 1 works")),
    (["plan", *SMALL, "--num-layers", "9"], ("--pp 4", "--num-layers 9", "--pp 3 works")),
    (["plan", *SMALL, "--budget", "32"], ("--budget '32'", "32GiB")),
    (["plan", *SMALL, "--budget", "5ms"], ("--budget '5ms'", "32GiB")),
    (["plan", *SMALL, "--budget", "900GiB"], ("--budget 900.00 GiB", "--budget 36.4GiB works")),
    (["plan", *SMALL, "--layout", "Et|t|t|tL"], ("4 layers", "--num-layers is 8")),
    (["plan", *SMALL, "--layout", "Et*4|t*4L"], ("2 stages", "--pp 4", "--pp 2 works")),
    (["plan", *SMALL, "--cluster", "moon"], ("--cluster 'moon'", "a100-40g-nvlink")),
    (["plan", *SMALL, "--cluster", "ascend-910b"], ("device.peak_tflops", "measure")),
    (["plan", *SMALL, "--model", "gpt-9b"], ("--model 'gpt-9b'", "gpt-7b")),
    (["plan", *SMALL, "--planner", "best"], ("--planner", "'best'", "'opt'")),
    (["plan", *SMALL, "--tp", "two"], ("--tp", "'two'", "4 works")),
    (["plan", *SMALL, "--hidden-dropout", "x"], ("--hidden-dropout", "'x'", "0.1 works")),
    (["plan", *SMALL, "--attention-dropout", "1"], ("--attention-dropout 1.0", "0.1 works")),
    (["plan", *SMALL, "--frobnicate"], ("--frobnicate", "lynx plan --help")),
    (["plan", *SMALL, "--seq-length", "4096"], ("--seq-length 4096", "--max-position-embeddings 4096")),
    (["plan", *SMALL, "--profile", "/none"], ("--profile '/none'", "lynx profile")),
    (["plan", *SMALL, "--run", "none"], ("--run 'none'", "gpt-7b-pcie")),
    (["plan", *SMALL, "--from-args", "/none"], ("--from-args '/none'", "launch script works")),
    (["plan", *SMALL, "--global-batch-size", "3", "--dp", "2"], ("--global-batch-size 3", "4 works")),
    (["plan", *TIGHT, "--budget", "3GiB"], ("stage 0", "--budget", "GiB would fit")),
    (["plan", *SMALL, "--output", "/none/plan.txt"], ("--output '/none/plan.txt'", "works")),
    (["plan", *SMALL, "--time-limit", "40"], ("--time-limit '40'", "1.5ms")),
    (["plan"], ("--model", "gpt-7b")),
    (["explain", "/none"], ("PLAN '/none'", "lynx plan --output plan.txt")),
    (["explain"], ("PLAN", "lynx explain --help")),
    (["simulate", *SMALL, "--trace", "/none/t.json"], ("--trace '/none/t.json'", "works")),
    (["compare", *SMALL, "--sequence-parallel", "--tp", "1"], ("--sequence-parallel", "--tp 2 works")),
    (["fly"], ("'fly'", "'plan'")),
]


@pytest.mark.parametrize(("words", "parts"), NONSENSE, ids=lambda value: " ".join(value)[-60:])
def test_nonsense_is_refused_in_one_line(capsys: Captured, words: list[str], parts: tuple[str, ...]) -> None:
    code, out, err = lynx(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("lynx")
    for part in parts:
        assert part in err


def test_a_cluster_file_with_a_missing_link_is_refused(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = Path(str(_toy_file())).read_text("utf-8")
    file.write_text(text.replace("[links.network]", "[elsewhere]"), "utf-8")
    code, _, err = lynx(capsys, "plan", *SMALL, "--cluster", str(file))
    assert code == 2
    assert "has no link [links.network]" in err


def _toy_file() -> Path:
    return Path(__file__).parents[2] / "megatron_lynx" / "configs" / "clusters" / "toy.toml"


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("profile", "--output"),
        ("tune", "--html"),
        ("tune", "--docs"),
        ("tune", "--output"),
        ("compare", "--html"),
        ("simulate", "--trace"),
        ("bench", "--json"),
        ("bench", "--docs"),
        ("reproduce", "--output"),
    ],
)
def test_a_file_that_could_not_be_written_is_refused_before_anything_is_done(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, flag: str
) -> None:
    """With no other flag: each of them would miss something, or search or measure for minutes."""
    module, _ = COMMANDS[command]
    begun: list[object] = []
    monkeypatch.setattr(import_module(module), "run", begun.append)
    for path in (tmp_path / "none" / "x.md", tmp_path):
        code, _, err = lynx(capsys, command, flag, str(path))
        assert code == 2
        assert f"{flag} '{path}'" in err
        assert "works" in err
    assert not begun
