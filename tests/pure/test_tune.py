"""``lynx tune``: the best of all configurations, as brute force finds it; and only those there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.cli.docs import SETTINGS, Setting, job_of
from megatron_lynx.cli.main import main
from megatron_lynx.errors import ConfigError, InfeasibleError
from megatron_lynx.estimate import estimate_costs
from megatron_lynx.plan import parse_plan
from megatron_lynx.presets import load_cluster
from megatron_lynx.search.extend import Costs
from megatron_lynx.search.floors import Floor
from megatron_lynx.search.found import WITH, WITHOUT, Tuned
from megatron_lynx.search.space import Config, Question, configurations
from megatron_lynx.search.tune import Limits, tune
from megatron_lynx.search.workflow import RECOMPUTE_METHODS, plan_job
from megatron_lynx.spec import Model
from megatron_lynx.units import MIB

SMALL = Model(
    num_layers=6,
    hidden_size=256,
    num_attention_heads=4,
    vocab_size=2048,
    max_position_embeddings=256,
    name="small",
)


def ask(**changes: Any) -> Question:
    parts: dict[str, Any] = {
        "model": SMALL,
        "cluster": load_cluster("toy"),
        "devices": 4,
        "seq_length": 256,
        "global_batch_size": 16,
        **changes,
    }
    return Question(**parts)


PROBLEMS = {
    "all memory": ask(fixed={"micro_batch_size": 2}),
    "little memory": ask(memory_bytes=150 * MIB, fixed={"micro_batch_size": 4, "vpp": 1}),
    "one stage": ask(devices=2, fixed={"pp": 1}, memory_bytes=190 * MIB),
    "chunks": ask(fixed={"tp": 1, "pp": 2, "micro_batch_size": 2}, memory_bytes=160 * MIB),
    "uneven": ask(devices=3, global_batch_size=12, memory_bytes=170 * MIB),
    "two nodes": ask(devices=16, global_batch_size=32, fixed={"micro_batch_size": 1, "dp": 4}),
}


def by_hand(question: Question, config: Config, side: str) -> int | None:
    """The best step of a configuration: every planner of a side, on the even split and with layers moved."""
    job, found = question.job(config), []
    for planner in ("heu", "opt") if side == WITH else RECOMPUTE_METHODS:
        for partition in ("keep", "search"):
            try:
                found.append(plan_job(job, planner, partition).iteration_ns)
            except InfeasibleError:
                continue
    return min(found, default=None)


@pytest.fixture(scope="module", params=sorted(PROBLEMS))
def solved(request: pytest.FixtureRequest) -> tuple[Question, Tuned, dict[str, dict[Config, int]]]:
    """A problem, what tune says, and every configuration planned."""
    question = PROBLEMS[request.param]
    steps: dict[str, dict[Config, int]] = {}
    for side in (WITH, WITHOUT):
        every = {config: by_hand(question, config, side) for config in configurations(question)}
        steps[side] = {config: step for config, step in every.items() if step is not None}
    return question, tune(question, limits=Limits(top=3, time_limit_s=3600)), steps


Solved = tuple[Question, Tuned, dict[str, dict[Config, int]]]


def test_the_best_is_that_of_brute_force(solved: Solved) -> None:
    _, tuned, steps = solved
    for side in (WITH, WITHOUT):
        best = tuned.best(side)
        assert (best and best.iteration_ns) == min(steps[side].values(), default=None)
    assert tuned.gain is None or tuned.gain >= 1


def test_bounds_are_bounds(solved: Solved) -> None:
    question, _, steps = solved
    for side in (WITH, WITHOUT):
        for config, step in steps[side].items():
            floor = Floor(question.job(config))
            assert floor.fits
            assert floor.step_ns(hides=side == WITH) <= step


def test_the_tally_adds_up(solved: Solved) -> None:
    question, tuned, _ = solved
    for tally in tuned.tallies.values():
        assert tally.configurations == len(configurations(question))
        assert tally.configurations == tally.no_room + tally.bounded + tally.planned + tally.unproven
        assert tally.unproven == 0


def test_quick_says_what_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    question = ask(memory_bytes=150 * MIB)
    whole, quick = (tune(question, limits=Limits(top=1, quick=q, time_limit_s=3600)) for q in (False, True))
    assert whole.tallies[WITH].unproven == 0
    for side in (WITH, WITHOUT):
        assert quick.rank_ns(side, 1) >= whole.rank_ns(side, 1)
        assert quick.tallies[side].exact <= whole.tallies[side].exact


def test_an_interrupted_search_returns_what_it_has() -> None:
    calls = 0

    def interrupt(text: str, tuned: Tuned) -> None:
        nonlocal calls
        calls += text.startswith("planning")
        if calls == 2:
            raise KeyboardInterrupt

    tuned = tune(ask(), limits=Limits(top=3), progress=interrupt)
    assert tuned.stopped == "interrupted"
    assert tuned.found[WITH]
    assert tuned.tallies[WITH].unproven > 0


def test_time_that_runs_out_leaves_an_answer_and_says_so() -> None:
    tuned = tune(ask(), limits=Limits(time_limit_s=0.0))
    assert tuned.stopped is not None
    assert tuned.tallies[WITH].unproven == tuned.tallies[WITH].configurations - tuned.tallies[WITH].no_room


def test_several_processes_find_the_same() -> None:
    question = PROBLEMS["little memory"]
    one, two = (tune(question, limits=Limits(top=2, jobs=jobs, time_limit_s=3600)) for jobs in (1, 2))
    for side in (WITH, WITHOUT):
        assert one.rank_ns(side, 1) == two.rank_ns(side, 1)


@pytest.mark.parametrize("cluster", ["a100-40g-nvlink", "a100-40g-pcie"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.model)
def test_no_row_of_the_comparison_can_be_missed(setting: Setting, cluster: str) -> None:
    """Each is among the configurations for its devices, and its floor does not rule it out: so the best
    is at least as fast."""
    job = job_of(setting, cluster)
    question = Question(
        model=job.model,
        cluster=load_cluster(cluster),
        devices=setting.tp * setting.pp,
        seq_length=2048,
        global_batch_size=job.batch.global_batch_size,
    )
    assert any(
        config.parallel == job.parallel
        and config.micro_batch_size == setting.micro_batch_size
        and not config.distributed_optimizer
        for config in configurations(question)
    )
    floor = Floor(job)
    assert floor.fits
    assert floor.step_ns() <= plan_job(job, "heu").iteration_ns


def test_sizes_that_are_given_stay() -> None:
    found = configurations(ask(fixed={"tp": 2, "sequence_parallel": 1}, max_tp=2))
    assert {config.tp for config in found} == {2}
    assert all(config.sequence_parallel for config in found)
    assert {config.dp * config.pp for config in found} == {2}
    with pytest.raises(ConfigError, match=r"--fixed tp=3.*works"):
        configurations(ask(fixed={"tp": 3}))


def test_costs_are_measured_where_they_were_and_extended_elsewhere() -> None:
    """A profile that is the estimate changes nothing; one twice as long makes all others twice as long."""
    question = ask()
    configs = configurations(question)
    config = next(one for one in configs if one.tp == 2 and one.pp == 1)
    table = estimate_costs(question.model, config.parallel, question.batch(config), question.cluster)
    for pace in (1, 2):
        slow = table.layer.at_pace(pace, pace)
        measured = Question(
            **{name: getattr(question, name) for name in ("model", "cluster", "devices", "seq_length")},
            global_batch_size=16,
            profiles=(table.__class__(**{**_fields(table), "layer": slow, "source": "measured here"}),),
        )
        costs, plain = Costs(measured, configs), Costs(question)
        for one in configs:
            made, source = costs.of(one)
            usual = plain.of(one)[0]
            same = (one.tp, one.sequence_parallel, one.micro_batch_size) == (
                2,
                False,
                config.micro_batch_size,
            )
            assert source == ("measured" if same else "extended")
            for region, time in usual.layer.forward_ns.items():
                assert abs(made.layer.forward_ns[region] - pace * time) <= 1
            assert made.p2p_ns == usual.p2p_ns or source == "measured"


def _fields(table: Any) -> dict[str, Any]:
    return {name: getattr(table, name) for name in table.__dataclass_fields__}


COMMAND = [
    *(
        "tune",
        "--num-layers",
        "4",
        "--hidden-size",
        "256",
        "--num-attention-heads",
        "4",
        "--vocab-size",
        "2048",
    ),
    *("--seq-length", "256", "--global-batch-size", "8", "--cluster", "toy", "--jobs", "1", "--top", "2"),
]


def test_the_command_prints_tables_a_page_a_plan_and_a_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, plan = tmp_path / "page.html", tmp_path / "plan.txt"
    words = [*COMMAND, "--devices", "2", "--html", str(page), "--output", str(plan)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "both tuned: " in out
    assert "when a figure of the cluster is off" in out
    assert out.splitlines()[-1].startswith("torchrun --nproc-per-node 2 -m megatron_lynx.pretrain_gpt")
    assert len(parse_plan(plan.read_text("utf-8")).stages) == 1
    assert '"points":[' in page.read_text("utf-8")


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--devices", "2", "--budget", "200MiB,1GiB", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [one["memory_bytes"] for one in whole["budgets"]] == [200 * MIB, 1024 * MIB]
    entry = whole["budgets"][1]["entries"][WITH][0]
    assert {"config", "row", "mfu", "peak_bytes", "peak_stage", "recomputed", "shifts", "exact"} <= set(entry)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ([], "--devices is missing"),
        (["--devices", "2", "--fixed", "tp=x"], "--fixed 'tp=x'"),
        (["--devices", "2", "--fixed", "tp=64"], "--fixed tp=64"),
        (["--devices", "2", "--choose", "99"], "--choose 99"),
    ],
)
def test_refusals_name_the_flag(words: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *words]) == 2
    assert flag in capsys.readouterr().err
