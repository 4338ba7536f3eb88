# shellcheck shell=bash
# Makes the virtual environments of this checkout. Sourced by the other scripts, from bash:
#
#   source scripts/setup_env.sh
#   lynx_venv .venv "megatron,test"     # afterwards .venv/bin/python has the package and the extras
#
# A venv that is up to date is used as it is. LYNX_PYTHON names the interpreter to use, if not the first found.

LYNX_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_lynx_new_enough() { # megatron-core needs Python 3.12
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

_lynx_find_python() {
    local pyenv="${PYENV_ROOT:-$HOME/.pyenv}/versions" candidate
    # 3.12 first: it is the version that was tested, and the one megatron-core has a wheel for.
    for candidate in python3.12 "$pyenv"/3.12*/bin/python3 python3.13 "$pyenv"/3.13*/bin/python3 \
        python3 "$pyenv"/3.1[4-9]*/bin/python3; do
        if _lynx_new_enough "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

_lynx_python() {
    if [ -n "${LYNX_PYTHON:-}" ]; then
        if ! _lynx_new_enough "$LYNX_PYTHON"; then
            echo "LYNX_PYTHON=$LYNX_PYTHON is no Python >= 3.12; unset it, or name one such as python3.12" >&2
            return 1
        fi
        command -v "$LYNX_PYTHON"
        return 0
    fi
    if ! _lynx_find_python; then
        echo "No Python >= 3.12 found (looked for python3.12, python3.13, python3 and pyenv's versions)." >&2
        echo "megatron-core needs it. Install one (Debian: apt-get install python3.12 python3.12-venv;" >&2
        echo "pyenv: pyenv install 3.12), or set LYNX_PYTHON to where it is." >&2
        return 1
    fi
}

# lynx_venv FOLDER EXTRAS: a venv at FOLDER, below the checkout, with this package and its EXTRAS.
lynx_venv() {
    local folder="$LYNX_ROOT/$1" extras="$2" python stamp
    python="$(_lynx_python)" || return 1
    stamp="$( (echo "$extras"; "$python" --version; cat "$LYNX_ROOT/pyproject.toml" "$LYNX_ROOT/setup.py") | cksum)"
    if [ -x "$folder/bin/python" ] && [ "$(cat "$folder/lynx-stamp" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    echo "Installing into $1: the package with [$extras] ($("$python" --version))"
    # A venv of the same Python is brought up to date in place: torch alone is gigabytes.
    if ! { [ "$("$folder/bin/python" --version 2>/dev/null)" = "$("$python" --version)" ] &&
        "$folder/bin/python" -m pip --version >/dev/null 2>&1; } && ! "$python" -m venv --clear "$folder"; then
        echo "$python cannot make a virtual environment (Debian: apt-get install python3.12-venv)" >&2
        return 1
    fi
    "$folder/bin/python" -m pip install -qq --disable-pip-version-check --editable "${LYNX_ROOT}[$extras]" || return 1
    echo "$stamp" >"$folder/lynx-stamp"
}

# lynx_te VERSION: Transformer Engine's Python, for tests that run it over their own kernels, in .venv-te/VERSION.
# Not into a venv: where that wheel is installed without its compiled half, nothing can import Megatron.
lynx_te() {
    local name=".venv-te/$1" folder="$LYNX_ROOT/.venv-te/$1" python="$LYNX_ROOT/.venv/bin/python" stamp
    local packages=("transformer-engine==$1" "pydantic==2.14.4" "einops==0.8.2")
    [ -x "$python" ] || python="$(_lynx_python)" || return 1
    stamp="$( (echo "${packages[@]}"; "$python" --version) | cksum)"
    if [ "$(cat "$folder/lynx-stamp" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    echo "Installing into $name: ${packages[*]}"
    rm -rf "$folder"
    "$python" -m pip install -qq --disable-pip-version-check --target "$folder" "${packages[@]}" || return 1
    echo "$stamp" >"$folder/lynx-stamp"
}

# The versions that the tests load: the one megatron-core names, an older one, the newest.
lynx_te_all() {
    local version
    for version in 2.17.1 2.14.1 2.20.2; do
        lynx_te "$version" || return 1
    done
}

# The page's tests drive a headless Chromium. Where there is none, root on Debian gets it; the tests say the rest.
lynx_chromium() {
    local name
    for name in "${LYNX_CHROMIUM:-chromium}" chromium-browser google-chrome google-chrome-stable chrome; do
        if command -v "$name" >/dev/null; then
            return 0
        fi
    done
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "Installing Chromium for the tests of the HTML page"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
    fi || echo "Chromium could not be installed: the tests of the HTML page will fail" >&2
}

# lynx_megatron VERSION: that release of megatron-core in .venv-megatron/VERSION, beside what .venv has. Put the
# folder first on PYTHONPATH to use it. A release that is there already is used as it is.
lynx_megatron() {
    local folder="$LYNX_ROOT/.venv-megatron/$1" draft
    [ ! -f "$folder/megatron/__init__.py" ] || return 0
    mkdir -p "$LYNX_ROOT/.venv-megatron" && draft="$(mktemp -d "$folder.XXXXXX")" || return 1
    echo "Fetching megatron-core $1"
    # Its trainer needs yaml, which the wheel does not ask for; all else is in .venv.
    "$LYNX_ROOT/.venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --target "$draft" \
        "megatron-core==$1" pyyaml || return 1
    # Without this file Python would look for what a release lacks in the one that is installed.
    touch "$draft/megatron/__init__.py"
    rm -rf "$folder" && mv "$draft" "$folder"
}

# The tests of the launch scripts start a SLURM cluster. Root on Debian gets it; fails where there is none.
lynx_slurm() {
    if [ "$(id -u)" -ne 0 ]; then
        echo "Not root: tests/slurm, which start a SLURM cluster, are left out" >&2
        return 1
    fi
    if command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v shellcheck >/dev/null; then
        return 0
    fi
    if command -v apt-get >/dev/null; then
        echo "Installing SLURM for the tests of the launch scripts"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            slurm-wlm munge shellcheck >/dev/null && return 0
    fi
    echo "SLURM could not be installed: tests/slurm are left out" >&2
    return 1
}
