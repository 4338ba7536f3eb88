#!/usr/bin/env bash
# What only a GPU can show, in eight minutes on one device. NOT RUN ON A GPU YET: none was at hand when this was
# written. Expect to mend it, and trust no figure that you have not seen it measure.
#
#   bash scripts/gpu_check.sh              # on the first CUDA device; the rows go to .gpu-check/rows.jsonl
#   bash scripts/gpu_check.sh --cpu        # its rehearsal with tiny models, on a machine without a GPU
#
# First tests/gpu: Megatron's trainer with local layers and, where Transformer Engine is installed, with its
# layers, each stock and under five plans: equal to the last bit, kept bytes as planned, host beside device
# time, peak beside plan, what the allocator reserved. Then what a window does: two ranks share the device and
# talk over gloo, through host memory, stock and under lynx (lynx bench).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${LYNX_PYTHON:-.venv/bin/python}"
folder=.gpu-check
rm -rf "$folder"
mkdir -p "$folder"
if [ "${1:-}" = --cpu ]; then
    MEGATRON_LYNX_CPU=1 OMP_NUM_THREADS=1 "$python" -m tests.gpu.check "$folder" --tiny
    exec "$python" -m megatron_lynx bench --local --links none --tiny --rounds 2 --cases tp2 --folder "$folder/bench"
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no CUDA device here; bash scripts/gpu_check.sh --cpu rehearses the check" >&2
    exit 2
fi
failed=0
LYNX_GPU_CHECK="$folder" "$python" -m pytest tests/gpu -m gpu -s || failed=1
shape=(--num-layers 8 --hidden-size 2048 --seq-length 2048 --micro-batch-size 1)
timeout 120 "$python" -m megatron_lynx bench --gpu --cases tp2 --minutes 1 --folder "$folder/bench" \
    --json "$folder/bench.json" "${shape[@]}" || failed=1
exit "$failed"
