#!/usr/bin/env bash
# Runs the tests. Arguments go to pytest: bash scripts/test.sh tests/megatron_cpu -k checkpoint
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$LYNX_ROOT"
lynx_venv .venv "megatron,test"
lynx_te_all
lynx_chromium
lynx_slurm || set -- --ignore=tests/slurm "$@"
exec .venv/bin/python -m pytest "$@"
