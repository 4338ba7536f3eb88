"""Launch scripts that the ``lynx`` command reads: Megatron's flags in them, and the shell around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.cli.megatron_args import MegatronArgs, parse_words, read_args
from megatron_lynx.cli.shell import read_script, words_of
from megatron_lynx.errors import ConfigError
from tests.support.command import Captured, lynx

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
