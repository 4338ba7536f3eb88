#!/usr/bin/env bash
# Megatron's own recomputation and lynx on two hosts joined by a cable of a given rate, on one machine: two
# network namespaces, a veth pair, a token bucket (tc). Needs root. Arguments go to `lynx bench`:
#
#   bash scripts/bench/two_hosts.sh                           # 1 Gbit/s, 400 Mbit/s, no limit: 50 minutes
#   bash scripts/bench/two_hosts.sh --links none --cases tp2  # the cable as fast as it can be
#
# Writes bench.json and docs/benchmarks.md with its plots, unless other --json and --docs are given. Keep the
# machine quiet: two cores are in use all the time. LYNX_PYTHON names the interpreter if not .venv's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python="${LYNX_PYTHON:-.venv/bin/python}"
if [ ! -x "$python" ]; then
    echo "$python is missing: bash scripts/quickstart.sh makes it, or set LYNX_PYTHON" >&2
    exit 2
fi

bench=
clean_up() {
    # `lynx bench` cleans up by itself. This is for the case that it was killed and could not.
    if [ -n "$bench" ]; then
        kill -TERM "$bench" 2>/dev/null || true
        wait "$bench" 2>/dev/null || true
        for side in 0 1; do
            ip netns del "lynx-bench-$bench-$side" 2>/dev/null || true
        done
    fi
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

"$python" -m megatron_lynx bench --json bench.json --docs docs/benchmarks.md "$@" &
bench=$!
wait "$bench"
