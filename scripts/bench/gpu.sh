#!/usr/bin/env bash
# The bench of two_hosts.sh on CUDA devices. THIS SCRIPT HAS NEVER BEEN RUN: no machine with a GPU was at hand
# when it was written. Expect to mend it, and trust no figure that you have not seen it measure.
#
# One GPU: the two ranks of TP=2 or PP=2 share it and talk over gloo, through host memory, so that collectives
# are slow and windows long. Two GPUs or more: one rank each, over NCCL. Both ranks are on this host.
#
#   bash scripts/bench/gpu.sh --cases tp2        # other flags of `lynx bench` too, such as --hidden-size 4096
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python="${LYNX_PYTHON:-.venv/bin/python}"
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no CUDA device here; scripts/bench/two_hosts.sh runs on the CPU" >&2
    exit 2
fi
shape=(--num-layers 24 --hidden-size 2048 --seq-length 2048 --micro-batch-size 2)
exec "$python" -m megatron_lynx bench --gpu --json bench-gpu.json --folder .bench-gpu "${shape[@]}" "$@"
