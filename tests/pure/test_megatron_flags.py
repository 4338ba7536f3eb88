"""Megatron's flags: what each does to a plan, in lists of arguments, YAML and checkpoints."""

from __future__ import annotations

import json
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.cli.launch.stand_in import sbatch_lines, slurm_environment, slurm_options, without_writes
from megatron_lynx.cli.megatron_args import MegatronArgs, parse_words, read_args
from megatron_lynx.cli.megatron_flags import COMPANIONS, REFUSED, UNMODELLED, WITHOUT_EFFECT, places
from megatron_lynx.errors import ConfigError
from tests.support.command import Captured, lynx

SHAPE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --vocab-size 1024 --bf16 --seq-length 512"


def test_a_bare_list_of_arguments(tmp_path: Path) -> None:
    file = tmp_path / "args.txt"
    file.write_text(
        "# a comment\r\n--num-layers=12\r\n--hidden-size 768 \\\n --num-attention-heads 12\n"
        "--fp16 --lr 1 --data-path 'a b'\n",
        "utf-8",
    )
    found = read_args(str(file))
    assert found.values["num_layers"] == 12
    assert found.values["hidden_size"] == 768
    assert found.values["dtype_bytes"] == 2
    assert found.ignored == ("--lr", "--data-path")
    assert found.world_size is None
    file.write_text("--num-layers $L\n", "utf-8")
    with pytest.raises(ConfigError, match=r"'\$L' is a variable"):
        read_args(str(file))
    for content in (b"\xff\xfe\x00", b"echo\x00"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"cannot be read|is no text"):
            read_args(str(file))


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ("--transformer-impl local", {"attention": "unfused"}),
        ("--attention-backend unfused", {"attention": "unfused"}),
        ("--attention-backend flash", {"attention": "flash"}),
        ("--no-bias-gelu-fusion", {"fused_activation": False}),
        ("--swiglu --no-bias-swiglu-fusion", {"fused_activation": False, "swiglu": True}),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        ("--position-embedding-type yarn", {"position_embedding_type": "yarn"}),
        ("--quick-geglu --qk-layernorm", {"quick_geglu": True, "qk_layernorm": True}),
        ("--window-size (128,0)", {"window_size": (128, 0)}),
        ("--softmax-type learnable --rotary-percent 0.5", {"softmax_type": "learnable"}),
        ("--attention-output-gate --no-rope-fusion", {"attention_output_gate": True}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--apply-query-key-layer-scaling", {"attention_softmax_in_fp32": True}),
        ("--no-create-attention-mask-in-dataloader", {"mask_from_data": False}),
        ("--bf16", {"dtype_bytes": 2, "mask_from_data": True}),
        ("", {"dtype_bytes": 4}),
        ("--vocab-size 1000", {"vocab_size": 1000}),
        ("--pad-vocab-size-to 250880", {"vocab_size": 250880}),
        ("--patch-tokenizer-type LLama3Tokenizer --extra-vocab-size 256", {"vocab_size": 128256}),
        ("--pipeline-model-parallel-layout Et|tL", {"layout": "Et|tL"}),
        ("--global-batch-size 1_024", {"global_batch_size": 1024}),
    ],
)
def test_flags_become_fields(flags: str, values: dict[str, Any]) -> None:
    found = parse_words(["--num-layers", "2", *flags.split()])
    assert {key: found.values[key] for key in values} == values
    assert found.refused == ()


def test_query_groups_count_only_with_grouped_attention() -> None:
    assert "num_query_groups" not in parse_words(["--num-query-groups", "8"]).values


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--num-experts 8", "--num-experts 8: .*--ignore num-experts"),
        ("--fp8-format hybrid", "--fp8-format hybrid: .*--ignore fp8-format"),
        ("--context-parallel-size 2", "--context-parallel-size 2: .* 1 works"),
        ("--multi-latent-attention", "--ignore multi-latent-attention"),
        ("--position-embedding-type alibi", "--position-embedding-type alibi: not planned"),
    ],
)
def test_what_is_not_planned_is_refused_by_name(flags: str, reason: str) -> None:
    words = flags.split()
    found = parse_words(words)
    assert len(found.refused) == 1
    with pytest.raises(ConfigError, match=reason):
        found.check()
    left = parse_words(words, ignore=[words[0][2:]])
    assert left.refused == ()
    assert f"planned as if these were not there: {words[0]}" in left.notes


def test_values_that_ask_for_nothing_are_no_reason() -> None:
    words = [
        "--context-parallel-size",
        "1",
        "--rotary-percent",
        "1.0",
        "--optimizer",
        "adam",
    ]
    found = parse_words(words)
    assert (found.refused, found.unmodelled, found.unknown) == ((), (), ())


def test_flags_beside_a_refused_one_are_not_called_without_effect() -> None:
    words = ["--moe-router-topk", "2", "--tp-comm-overlap", "--disable-tp-comm-split-ag"]
    assert parse_words(words).ignored == ("--moe-router-topk",)
    assert parse_words(["--num-experts", "8", *words]).ignored == ()
    assert parse_words(words).unmodelled == ("--tp-comm-overlap (time of tensor-parallel collectives)",)


def test_unknown_flags_are_named_as_such() -> None:
    found = parse_words(["--frobnicate", "3", "--lr", "1"])
    assert (found.unknown, found.ignored) == (("--frobnicate",), ("--lr",))
    assert "not known to Megatron-Core" in " ".join(found.all_notes())


def test_no_flag_has_two_places() -> None:
    named = [row for table in (REFUSED, COMPANIONS, UNMODELLED, WITHOUT_EFFECT) for row in table]
    assert len(named) == len(set(named))
    assert {len(places(row)) for row in named if "*" not in row and "?" not in row} == {1}


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ("--num-layers 7 --decoder-first-pipeline-num-layers 1", "Et|ttt|tttL"),
        ("--decoder-last-pipeline-num-layers 2", "Ettt|ttt|ttL"),
        (
            "--num-layers 7 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "Ett|ttt|ttL",
        ),
        ("--pipeline-model-parallel-layout E,t*3|(t)*3|t*2,L", "Ettt|ttt|ttL"),
    ],
)  # fmt: skip
def test_uneven_ends_become_a_layout(capsys: Captured, tmp_path: Path, flags: str, layout: str) -> None:
    file = tmp_path / "args.txt"
    file.write_text(f"{SHAPE} --pipeline-model-parallel-size 3 {flags}\n", "utf-8")
    words = ("plan", "--from-args", str(file), "--dp", "1", "--planner", "none", "--json")
    code, out, err = lynx(capsys, *words)
    assert code == 0, err
    stages = json.loads(out)["rows"][0]["stages"]
    counts = [stage.count("t") for stage in layout.split("|")]
    assert [len(stage["layers"]) for stage in stages] == counts


def test_uneven_ends_with_virtual_stages(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "args.txt"
    sizes = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    file.write_text(f"{SHAPE} {sizes} --decoder-first-pipeline-num-layers 2\n", "utf-8")
    words = ("plan", "--from-args", str(file), "--dp", "1", "--planner", "none", "--json")
    code, out, err = lynx(capsys, *words)
    assert code == 0, err
    assert [stage["layers"] for stage in json.loads(out)["rows"][0]["stages"]] == [[0, 4], [1, 2, 3, 5, 6, 7]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-model-parallel-layout Et*4|t*4mL", "has m, a layer of multi-token prediction"),
        ("--account-for-loss-in-pipeline-split", "do not divide over 2 stages; --num-layers 9 would"),
        ("--num-layers many", "--num-layers 'many' is not a number; --num-layers 24 works"),
        ("--num-layers --hidden-size 3", "--num-layers has no value"),
        ("--num-layers-per-virtual-pipeline-stage 3", "does not divide the 4 layers"),
    ],
)
def test_sizes_that_do_not_work_are_refused(
    capsys: Captured, tmp_path: Path, flags: str, message: str
) -> None:
    file = tmp_path / "args.txt"
    file.write_text(f"{SHAPE} --pipeline-model-parallel-size 2 {flags}\n", "utf-8")
    code, _, err = lynx(capsys, "plan", "--from-args", str(file), "--dp", "1")
    assert code == 2
    assert message in err


def test_world_size_and_dp_must_agree(capsys: Captured) -> None:
    job = ("plan", "--model", "gpt-1.3b", "--tp", "2", "--pp", "4", "--planner", "none", "--json")
    code, out, err = lynx(capsys, *job, "--world-size", "16")
    assert code == 0, err
    assert json.loads(out)["parallel"]["dp"] == 2
    for words in (("--world-size", "12"), ("--world-size", "16", "--dp", "4")):
        code, _, err = lynx(capsys, *job, *words)
        assert code == 2
        assert "--world-size" in err


YAML = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
BEFORE_SCRIPT: |
  --num-layers: 99
MODEL_ARGS:
  --num-layers: 12   # a comment
  --hidden-size: "512"
  --num-attention-heads: 8
  --swiglu: true
  --sequence-parallel: false
  --recompute-modules:
    - mlp
    - layernorm
  --train-iters: 5
"""

CONFIG = """
language_model:
  num_layers: 24
  hidden_size: 1024
  num_attention_heads: 16
  add_bias_linear: False
  gated_linear_unit: True
  bias_swiglu_fusion: true
model_parallel:
  tensor_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
bf16: true
micro_batch_size: 2
"""


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(YAML, "utf-8")
    found = read_args(str(file))
    assert (found.values["num_layers"], found.values["hidden_size"]) == (12, 512)
    assert found.values["swiglu"]
    assert "sequence_parallel" not in found.values
    assert "--recompute-modules mlp layernorm is one of" in " ".join(found.notes)
    file.write_text(CONFIG, "utf-8")
    values = read_args(str(file)).values
    assert (values["num_layers"], values["tp"], values["dtype_bytes"]) == (24, 2, 2)
    assert (values["add_bias_linear"], values["swiglu"]) == (False, True)
    assert "fused_activation" not in values
    file.write_text("a: &x\n  b: 1\n", "utf-8")
    with pytest.raises(ConfigError, match="line 1: 'a: &x' is more YAML"):
        read_args(str(file))


def test_what_a_checkpoint_saved(tmp_path: Path) -> None:
    saved = Namespace(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        add_bias_linear=False,
        bf16=True,
        swiglu=False,
        num_experts=None,
        consumed_train_samples=5,
        save="/out",
        offset=OrderedDict(a=Path("x")),
    )
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10", "utf-8")
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"args": saved, "iteration": 10}))
    found = read_args(str(tmp_path))
    assert (found.values["num_layers"], found.values["add_bias_linear"]) == (12, False)
    assert (found.refused, found.unknown, found.ignored) == ((), (), ())
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"iteration": 10}))
    with pytest.raises(ConfigError, match="holds no arguments"):
        read_args(str(tmp_path))
    (folder / "common.pt").unlink()
    with pytest.raises(ConfigError, match=r"is a folder without common\.pt"):
        read_args(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b > c", "a b > /dev/null"),
        ('a "x > y" >> "$F" 2>&1', 'a "x > y" >> /dev/null 2>&1'),
        ("a &> log", "a &> /dev/null"),
        ("a > $(b > c)/d e", "a > /dev/null e"),
        ("a < in", "a < in"),
        ("x=$(b > c)", "x=$(b > c)"),
        ("a >&2", "a >&2"),
        ("exec > >(tee f) 2>&1", "exec > /dev/null 2>&1"),
        ("cat > f <<EOF\na > b\nEOF", "cat > /dev/null <<EOF\na > b\nEOF"),
        ("a 2> '/x y' b", "a 2> /dev/null b"),
        ("[ a \\> b ]", "[ a \\> b ]"),
    ],
)  # fmt: skip
def test_output_to_files_is_left_out(text: str, expected: str) -> None:
    assert without_writes(text) == expected


def test_slurm_sizes() -> None:
    text = "#!/bin/bash\n#SBATCH -N 4 --ntasks-per-node=2\n# note\n#SBATCH --gres=gpu:a100:8 # gpus\nrun\n"
    text += "#SBATCH -N 9\n"
    options = slurm_options(sbatch_lines(text))
    assert options == {"nodes": "4", "ntasks-per-node": "2", "gres": "gpu:a100:8"}
    found = slurm_environment(options)
    assert (found["SLURM_NTASKS"], found["SLURM_NNODES"], found["SLURM_GPUS_ON_NODE"]) == ("8", "4", "8")
    assert slurm_environment({}) == {}


NEMO = """name: megatron_gpt
trainer:
  devices: 8
  num_nodes: 2
  precision: bf16-mixed
  logger: False # by exp_manager
exp_manager:
  checkpoint_callback_params:
    model_parallel_size: ${multiply:${model.tensor_model_parallel_size}, 4}
model:
  mcore_gpt: True
  micro_batch_size: 4
  global_batch_size: 64
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 3
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 24 # a comment
  hidden_size: 2048
  ffn_hidden_size: 5504
  num_attention_heads: 16
  num_query_groups: 4
  hidden_dropout: 0.0
  kv_channels: null
  normalization: rmsnorm
  bias: False
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: False
  sequence_parallel: True
  activations_checkpoint_granularity: full
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 2
  tokenizer:
    library: megatron
  optim:
    name: distributed_fused_adam
    betas:
    - 0.9
    - 0.98
"""


def nemo(tmp_path: Path, text: str = NEMO) -> MegatronArgs:
    file = tmp_path / "nemo.yaml"
    file.write_text(text)
    return read_args(str(file))


def test_yaml_of_nemo(tmp_path: Path) -> None:
    found = nemo(tmp_path)
    assert found.world_size == 16
    sizes = {"num_layers": 24, "hidden_size": 2048, "ffn_hidden_size": 5504, "num_query_groups": 4}
    batch = {"micro_batch_size": 4, "global_batch_size": 64, "seq_length": 4096}
    more = {"tp": 2, "pp": 4, "vpp": 3, "dtype_bytes": 2, "sequence_parallel": True, "swiglu": True}
    rest = {
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "use_distributed_optimizer": True,
        "max_position_embeddings": 4096,
        "hidden_dropout": 0.0,
        "transformer_impl": "transformer_engine",
    }
    wanted = sizes | batch | more | rest
    assert {name: found.values.get(name) for name in wanted} == wanted
    assert found.unknown == ("--mcore-gpt",)
    assert any("--recompute-num-layers 2" in note for note in found.notes)
    assert not found.refused


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ffn_hidden_size: ${multiply:4, ${.hidden_size}}", "ffn_hidden_size: .* is computed by NeMo"),
        ("activation: fast-geglu", "model.activation: fast-geglu is not planned; gelu works"),
        ("normalization: batchnorm", "model.normalization: batchnorm is not planned; layernorm works"),
    ],
)
def test_what_nemo_says_otherwise_is_refused(line: str, says: str, tmp_path: Path) -> None:
    name = line.partition(":")[0]
    changed = "\n".join(
        f"  {line}" if row.strip().startswith(f"{name}:") else row for row in NEMO.split("\n")
    )
    with pytest.raises(ConfigError, match=says):
        nemo(tmp_path, changed)


def test_fp8_of_nemo_is_refused_like_megatrons(tmp_path: Path) -> None:
    found = nemo(tmp_path, NEMO.replace("mcore_gpt: True", "fp8: True"))
    assert found.refused[0].startswith("--fp8-format hybrid")
