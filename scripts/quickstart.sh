#!/usr/bin/env bash
# From nothing to a table: installs into .venv, then trains a small GPT with each recomputation method.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$LYNX_ROOT"
lynx_venv .venv "megatron,test"
exec .venv/bin/python scripts/quickstart.py "$@"
