#!/usr/bin/env bash
# Submits train.sbatch for several runs, each with the nodes that its parallel sizes need.
#
#   GPUS_PER_NODE=8 bash scripts/slurm/sweep.sh CHECKPOINT_ROOT RUN... -- MEGATRON'S FLAGS
#
# Without a RUN: the GPTs from 1.3B to 23B of configs/runs, with parallel sizes for 40 GB devices.
# SBATCH_FLAGS (words) goes to sbatch. Each run trains one replica: DP 1.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

source "$here/lynx.sh"
lynx_usage 1 "sweep.sh needs CHECKPOINT_ROOT [RUN...] [-- MEGATRON'S FLAGS]; for example ckpt gpt-7b -- \
--data-path data/text --tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt" "$@"
root=$1
shift
runs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    runs+=("$1")
    shift
done
[ $# -eq 0 ] || shift
lynx_tokenizer sweep.sh "$@"
[ ${#runs[@]} -gt 0 ] || runs=(gpt-1.3b gpt-2.7b gpt-4.7b gpt-7b gpt-13b gpt-20b gpt-23b)
per_node=${GPUS_PER_NODE:-8}
for run in "${runs[@]}"; do
    text=$("${PYTHON:-python3}" -m megatron_lynx args --run "$run")
    eval "flags=($text)"
    replica=1
    for size in tensor pipeline; do
        replica=$((replica * $(lynx_value "--$size-model-parallel-size" "${flags[@]}")))
    done
    name=$(basename "$run" .toml)
    # shellcheck disable=SC2086  # words
    sbatch --nodes $(((replica + per_node - 1) / per_node)) --job-name "lynx-$name" ${SBATCH_FLAGS---gpus-per-node $per_node} \
        "$here/train.sbatch" "$run" "$root/$name" "$@"
done
