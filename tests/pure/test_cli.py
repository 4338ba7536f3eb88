"""The ``lynx`` command: output people and machines read, scripts it reads, nonsense it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.cli.docs import Setting, write_comparison
from megatron_lynx.cli.main import COMMANDS, main
from megatron_lynx.cli.megatron_args import MegatronArgs, parse_words, read_args
from megatron_lynx.cli.shell import read_script, words_of
from megatron_lynx.errors import ConfigError
from megatron_lynx.plan import parse_plan
from megatron_lynx.presets import load_cluster, load_model
from megatron_lynx.spec import Batch, Parallel

SMALL = ("--model", "gpt-1.3b", "--num-layers", "8", "--tp", "2", "--pp", "4", "--cluster", "a100-40g-pcie")
TIGHT = (*SMALL, "--micro-batch-size", "16", "--vocab-size", "8192", "--budget", "6GiB")

Captured = pytest.CaptureFixture[str]


def lynx(capsys: Captured, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


# What it prints


def test_plan_prints_a_table_and_writes_the_plan(capsys: Captured, tmp_path: Path) -> None:
    for name in ("plan.txt", "plan.json"):
        file = tmp_path / name
        code, out, err = lynx(capsys, "plan", *TIGHT, "--planner", "heu", "--output", str(file))
        assert (code, err) == (0, "")
        assert "stage" in out
        assert f"plan written to {file}" in out.replace("\n", "")
        plan = parse_plan(file.read_text("utf-8"))
        assert plan.planner == "heu"
        assert file.read_text("utf-8").startswith("{") == name.endswith("json")


ROW_FIELDS = {
    "method": str,
    "planner": str,
    "fits": bool,
    "reason": str | None,
    "iteration_ns": int | None,
    "tokens_per_second": float | None,
    "layout": str | None,
    "stages": list,
}
STAGE_FIELDS = {
    "stage",
    "layers",
    "in_flight",
    "static_bytes",
    "kept_bytes",
    "rebuilt_bytes",
    "peak_bytes",
    "forward_ns",
    "backward_ns",
    "recompute_hidden_ns",
    "recompute_exposed_ns",
    "parameters",
}


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_json_is_as_the_design_says(capsys: Captured, command: str) -> None:
    code, out, err = lynx(capsys, command, *TIGHT, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert set(data) == {"schema", "model", "parallel", "batch", "cluster", "rows"}
    assert data["schema"] == 1
    assert len(data["rows"]) == (1 if command == "plan" else 13)
    for row in data["rows"]:
        assert set(row) == set(ROW_FIELDS)
        assert all(isinstance(row[name], kind) for name, kind in ROW_FIELDS.items())
        for stage in row["stages"]:
            assert set(stage) == STAGE_FIELDS
            assert all(isinstance(value, int) for name, value in stage.items() if name != "layers")
        if row["fits"]:
            assert sorted(k for stage in row["stages"] for k in stage["layers"]) == list(range(8))


def test_compare_shows_both_speedups(capsys: Captured) -> None:
    code, out, _ = lynx(capsys, "compare", *TIGHT)
    assert code == 0
    for word in ("over Megatron", "over checkmate", "full-block", "opt + search", "does not fit"):
        assert word in out


def test_explain_says_what_is_dropped_and_where_memory_goes(capsys: Captured, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.txt")
    lynx(capsys, "plan", *TIGHT, "--planner", "heu", "--output", file)
    code, out, err = lynx(capsys, "explain", file)
    assert (code, err) == (0, "")
    assert "rebuilt in" in out
    assert "--from-args" in out
    code, out, _ = lynx(capsys, "explain", file, *TIGHT)
    assert code == 0
    for word in ("weights", "optimizer", "kept", "backward workspace", "peak", "free"):
        assert word in out
    code, out, _ = lynx(capsys, "explain", file, *TIGHT, "--json")
    stage = json.loads(out)["stages"][0]
    assert {"groups", "static", "peak", "chunks", "layers"} <= set(stage)
    assert sum(stage["peak"]["owners"].values()) == stage["peak"]["size_bytes"]


def test_explain_refuses_a_plan_of_another_job(capsys: Captured, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.txt")
    lynx(capsys, "plan", *TIGHT, "--planner", "heu", "--output", file)
    code, _, err = lynx(capsys, "explain", file, *TIGHT, "--micro-batch-size", "8")
    assert code == 2
    assert "made for another job" in err


def test_simulate_writes_a_trace(capsys: Captured, tmp_path: Path) -> None:
    plan, trace = str(tmp_path / "plan.txt"), tmp_path / "trace.json"
    lynx(capsys, "plan", *TIGHT, "--planner", "heu", "--output", plan)
    code, out, _ = lynx(capsys, "simulate", plan, *TIGHT, "--trace", str(trace))
    assert code == 0
    assert "idle" in out
    events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    code, out, _ = lynx(capsys, "simulate", *TIGHT, "--planner", "heu", "--json")
    data = json.loads(out)
    assert data["planner"] == "heu"
    compute = ("forward", "backward", "recompute-hidden", "recompute-stall", "recompute-exposed")
    for stage in data["stages"]:
        busy = sum(stage["totals_ns"][kind] for kind in (*compute, "wait", "idle"))
        assert busy == data["makespan_ns"]


def test_a_run_file_is_a_whole_job(capsys: Captured, tmp_path: Path) -> None:
    code, out, _ = lynx(capsys, "plan", "--run", "gpt-1.3b-toy", "--json")
    assert code == 0
    data = json.loads(out)
    assert (data["model"]["name"], data["cluster"]["name"]) == ("gpt-1.3b", "toy")
    code, out, _ = lynx(capsys, "plan", "--run", "gpt-1.3b-toy", "--tp", "4", "--json")
    assert json.loads(out)["parallel"]["tp"] == 4
    file = tmp_path / "mine.toml"
    file.write_text('model = "gpt-7b"\nmicro_batches = 3\n', "utf-8")
    code, _, err = lynx(capsys, "plan", "--run", str(file))
    assert code == 2
    assert "'micro_batches' is not a flag of a job" in err


def test_a_measured_profile_replaces_estimates(capsys: Captured, tmp_path: Path) -> None:
    from megatron_lynx.estimate import estimate_costs

    model = load_model("gpt-1.3b", num_layers=8)
    batch = Batch(seq_length=2048, micro_batch_size=1, global_batch_size=16)
    costs = estimate_costs(model, Parallel(tp=2, pp=4), batch, load_cluster("toy"))
    file = tmp_path / "costs.json"
    file.write_text(costs.to_json(), "utf-8")
    code, out, _ = lynx(capsys, "plan", *SMALL, "--profile", str(file), "--json")
    assert code == 0
    assert json.loads(out)["cluster"]["costs"] == "estimate toy"
    code, _, err = lynx(capsys, "plan", *SMALL, "--micro-batch-size", "2", "--profile", str(file))
    assert code == 2
    assert "measured for another layer shape" in err


def test_help_and_version(capsys: Captured) -> None:
    code, out, _ = lynx(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)
    code, out, _ = lynx(capsys, "--version")
    assert code == 0
    assert out.startswith("lynx ")
    code, out, _ = lynx(capsys)
    assert code == 2
    for name in ("plan", "compare", "explain", "simulate"):
        code, out, _ = lynx(capsys, name, "--help")
        assert code == 0
        assert "--from-args" in out


# What it refuses: one line, exit code 2, the flag, the value, a value that works

NONSENSE: list[tuple[list[str], tuple[str, ...]]] = [
    (["plan", *SMALL, "--tp", "3"], ("--num-attention-heads 16", "--tp 3", "18 would be")),
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
    (["plan", *TIGHT, "--budget", "3GiB"], ("stage 3", "--budget", "GiB would fit")),
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


# Launch scripts

SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=2
# Trains a model  --num-layers 99
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TP=4; PP="2"
MODEL_SIZE=$1
CHECKPOINT_PATH=$2 #<Specify path>
if [ -z "$MODEL_SIZE" ]; then
    MODEL_SIZE=small
fi

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr ${MASTER_ADDR:-localhost}
)

GPT_MODEL_ARGS=(
    --num-layers 24   # a comment inside
    --hidden-size 2048
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
    --seq-length 1024
    --max-position-embeddings 1024
    --attention-backend auto
    --swiglu --disable-bias-linear
    --normalization "RMSNorm"
    --position-embedding-type 'rope'
    --untie-embeddings-and-output-weights
)
GPT_MODEL_ARGS+=( --hidden-dropout 0.0 --attention-dropout 0 )

TRAINING_ARGS=" --micro-batch-size 2 \
    --global-batch-size $((2 * 4 * WORLD_SIZE)) \
    --lr 6.0e-5 --bf16 --clip-grad 1.0"

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    ${TRAINING_ARGS} \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP \
    --num-layers-per-virtual-pipeline-stage 3 \
    --sequence-parallel --use-distributed-optimizer \
    --tokenizer-type GPT2BPETokenizer --vocab-file $VOCAB_FILE \
    --recompute-granularity selective --save "$CHECKPOINT_PATH" | tee log.txt
"""


def test_a_launch_script_is_read(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT, "utf-8")
    code, out, err = lynx(capsys, "plan", "--from-args", str(file), "--cluster", "h100-nvlink", "--json")
    assert code == 0, err
    data = json.loads(out)
    model = data["model"]
    assert (model["num_layers"], model["hidden_size"], model["num_query_groups"]) == (24, 2048, 8)
    assert (model["swiglu"], model["add_bias_linear"], model["normalization"]) == (True, False, "RMSNorm")
    assert (model["hidden_dropout"], model["attention_dropout"], model["dtype_bytes"]) == (0.0, 0.0, 2)
    assert (model["position_embedding_type"], model["attention"]) == ("rope", "flash")
    assert model["vocab_size"] == 50257
    parallel = data["parallel"]
    assert [parallel[name] for name in ("tp", "pp", "vpp", "dp")] == [4, 2, 4, 2]
    assert parallel["sequence_parallel"]
    assert parallel["distributed_optimizer"]
    assert data["batch"]["global_batch_size"] == 128
    assert "--lr" in err
    assert "--clip-grad" in err
    assert "--num-layers" not in err
    assert "vocabulary of GPT2BPETokenizer taken as 50257" in err
    assert "--recompute-granularity selective" in err


def test_flags_beside_a_script_win(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT, "utf-8")
    words = ("--from-args", str(file), "--vpp", "1", "--num-layers", "8", "--cluster", "h100-nvlink")
    code, out, err = lynx(capsys, "plan", *words, "--vocab-size", "32000", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert (data["model"]["num_layers"], data["model"]["vocab_size"]) == (8, 32000)


def read(text: str, tmp_path: Path, **environment: str) -> MegatronArgs:
    file = tmp_path / "args.txt"
    file.write_text(text, "utf-8")
    return read_args(str(file), environment)


def test_a_bare_list_of_arguments(tmp_path: Path) -> None:
    found = read(
        "--num-layers=12\n--hidden-size 768 --num-attention-heads 12\n--fp16\n--log-interval 5\n", tmp_path
    )
    assert found.values["num_layers"] == 12
    assert found.values["hidden_size"] == 768
    assert found.values["dtype_bytes"] == 2
    assert found.ignored == ("--log-interval",)
    assert found.world_size is None


def test_a_command_inside_a_string(tmp_path: Path) -> None:
    text = (
        'options=" \\\n --num-layers 12 \\\n --hidden-size ${H} --num-attention-heads 12"\n'
        'run_cmd="python -u pretrain_gpt.py ${options} --micro-batch-size 1"\n'
        'srun -l --output=log sh -c "${run_cmd}"\n'
    )
    found = read(text, tmp_path, H="768")
    assert (found.values["num_layers"], found.values["hidden_size"]) == (12, 768)
    assert found.values["micro_batch_size"] == 1


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ("--transformer-impl local", {"attention": "unfused"}),
        ("--attention-backend unfused", {"attention": "unfused"}),
        ("--attention-backend flash", {"attention": "flash"}),
        ("--no-bias-gelu-fusion", {"fused_activation": False}),
        ("--swiglu --no-bias-swiglu-fusion", {"fused_activation": False, "swiglu": True}),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--bf16", {"dtype_bytes": 2}),
        ("", {"dtype_bytes": 4}),
        ("--vocab-size 1000", {"vocab_size": 1000}),
        ("--pipeline-model-parallel-layout Et|tL", {"layout": "Et|tL"}),
    ],
)
def test_flags_become_fields(flags: str, values: dict[str, Any]) -> None:
    found = parse_words(["--num-layers", "2", *flags.split()], "args")
    assert {key: found.values[key] for key in values} == values


def test_query_groups_count_only_with_grouped_attention() -> None:
    assert "num_query_groups" not in parse_words(["--num-query-groups", "8"], "args").values


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 8", "--num-experts 8: .* dense model"),
        ("--fp8-format hybrid", "--fp8-format hybrid: .* --bf16 works"),
        ("--context-parallel-size 2", "--context-parallel-size 2 .* 1 works"),
        ("--multi-latent-attention", "latent attention"),
        ("--num-layers many", "--num-layers 'many' is not a number; --num-layers 24 works"),
        ("--num-layers --hidden-size 3", "--num-layers has no value"),
    ],
)
def test_what_is_not_planned_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_words(flags.split(), "args")


def test_an_unset_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--num-layers has no value \(unset in the script: LAYERS\)"):
        read("python pretrain_gpt.py --num-layers $LAYERS --hidden-size 64\n", tmp_path)
    assert read("python p.py --num-layers $LAYERS\n", tmp_path, LAYERS="6").values["num_layers"] == 6


def test_a_file_without_flags_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no flag of Megatron"):
        read("echo hello\n", tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_args(str(tmp_path / "bytes"))


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ("--decoder-first-pipeline-num-layers 1", "Et*1|t*3|t*4L"),
        ("--decoder-last-pipeline-num-layers 2", "Et*3|t*3|t*2L"),
    ],
)
def test_uneven_ends_become_a_layout(capsys: Captured, tmp_path: Path, flags: str, layout: str) -> None:
    file = tmp_path / "args.txt"
    layers = "7" if "first" in flags else "8"
    shape = f"--num-layers {layers} --hidden-size 512 --num-attention-heads 8 --vocab-size 1024 --bf16"
    file.write_text(f"{shape} --seq-length 512 --pipeline-model-parallel-size 3 {flags}\n", "utf-8")
    words = ("plan", "--from-args", str(file), "--json")
    code, out, err = lynx(capsys, *words)
    if layout.endswith("t*4L"):
        layout = "Et*1|t*3|t*3L"
    assert code == 0, err
    assert json.loads(out)["rows"][0]["layout"] == layout


# The shell


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b  c", ["a", "b", "c"]),
        ("a 'b c' \"d e\" f\\ g", ["a", "b c", "d e", "f g"]),
        ("X=3; a $X ${X} \"$X\" '$X' \\$X", ["a", "3", "3", "3", "$X", "$X"]),
        ("X='1 2'; a $X \"$X\"", ["a", "1", "2", "1 2"]),
        ("X=(1 '2 3'); a ${X[@]} \"${X[@]}\" ${X[1]}", ["a", "1", "2", "3", "1", "2 3", "2", "3"]),
        ("X=(1); X+=(2); Y=a; Y+=b; a ${X[*]} $Y", ["a", "1", "2", "ab"]),
        ("a ${U:-x} ${U-y} ${U:+z}", ["a", "x", "y"]),
        ("N=4; a $((N * 2 + 1)) $(( (1+2)*3 - 10/2 % 3 )) $((-N))", ["a", "9", "7", "-4"]),
        ("a $(date +%s) `x` b", ["a", "`x`", "b"]),
        ("a b # c", ["a", "b"]),
        ("a b#c", ["a", "b#c"]),
        ("a \\\n  b", ["a", "b"]),
        ("a \"\" b", ["a", "", "b"]),
        ("if true; then a b; fi", ["a", "b"]),
        ("export X=5 && a $X", ["a", "5"]),
        ("X=5 a b", ["a", "b"]),
        ("X=a$Y-c; a $X", ["a", "a-c"]),
    ],
)  # fmt: skip
def test_the_shell_expands_as_a_shell(text: str, words: list[str]) -> None:
    commands = [command for command in read_script(text).commands if command[0] == "a"]
    assert commands == [words]


def test_odd_scripts_do_not_crash() -> None:
    for text in ("", "'unclosed", '"unclosed', "X=(", "${", "$((", "$((1/0))", ")", "a ${X[9]}", "\\"):
        assert read_script(text).commands is not None
    assert words_of(["sh", "-c", 'x --a "1']) == ["sh", "-c", "x", "--a", '"1']


# Documents


def test_the_comparison_document(tmp_path: Path) -> None:
    file = tmp_path / "docs" / "comparison.md"
    write_comparison(str(file), [Setting("gpt-1.3b", 2, 4, 16)])
    text = file.read_text("utf-8")
    assert text.count("| gpt-1.3b |") == 2
    for word in ("simulated", "over checkmate", "a100-40g-pcie", "opt + search"):
        assert word in text
