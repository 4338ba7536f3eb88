#!/usr/bin/env bash
# Submits train.sbatch for each GPT from 1.3B to 23B, with parallel sizes that fit 40 GB devices.
#
#   bash scripts/slurm/sweep.sh DATA_PREFIX CHECKPOINT_ROOT [more Megatron flags]
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "sweep.sh needs DATA_PREFIX CHECKPOINT_ROOT; for example data/text ckpt" >&2
    exit 2
fi
data=$1 root=$2
shift 2
here=$(dirname "${BASH_SOURCE[0]}")
while read -r model tp pp; do
    nodes=$(((tp * pp + 7) / 8))
    sbatch --nodes "$nodes" --job-name "lynx-$model" "$here/train.sbatch" "$model" "$tp" "$pp" "$data" \
        "$root/$model" "$@"
done <<'JOBS'
gpt-1.3b 2 4
gpt-2.7b 2 4
gpt-4.7b 4 4
gpt-7b 4 4
gpt-13b 4 8
gpt-20b 8 4
gpt-23b 8 5
JOBS
