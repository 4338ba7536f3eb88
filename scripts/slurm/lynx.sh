# shellcheck shell=bash
# What the batch scripts of this folder share; they source it. From the environment:
#
#   PYTHON            the interpreter that has megatron_lynx (default: python3)
#   CONTAINER_IMAGE   run everything in this image (pyxis), with CONTAINER_MOUNTS if it is set
#   RANKS_PER_NODE    ranks on each node, where they are not the allocation's GPUs
#   MASTER_PORT       default: one of the job's own
#   OMP_NUM_THREADS   default: 1, as torchrun has it
#   MEGATRON_LYNX_CPU 1: train on CPUs over gloo

flags=() # Megatron's, of the run: lynx_flags

# lynx_usage COUNT TEXT ARGUMENTS...: end with TEXT and code 2 if there are fewer than COUNT arguments.
lynx_usage() {
    if [ $(($# - 2)) -lt "$1" ]; then
        echo "$2" >&2
        exit 2
    fi
}

# lynx_has FLAG ARGUMENTS...: whether FLAG is among the arguments.
lynx_has() {
    local flag=$1 word
    shift
    for word in "$@"; do
        case $word in "$flag" | "$flag="*) return 0 ;; esac
    done
    return 1
}

# lynx_value FLAG ARGUMENTS...: the word after FLAG.
lynx_value() {
    local flag=$1
    shift
    while [ "$1" != "$flag" ]; do shift; done
    echo "$2"
}

# Which Python, and in which container: sets python and container.
lynx_python() {
    python=${PYTHON:-python3}
    container=()
    if [ -n "${CONTAINER_IMAGE:-}" ]; then
        container=(--container-image="$CONTAINER_IMAGE")
        container+=(${CONTAINER_MOUNTS:+--container-mounts="$CONTAINER_MOUNTS"})
    fi
}

# What the allocation has: sets nodes, ranks (on a node), world, and how srun is called.
lynx_allocation() {
    lynx_python
    nodes=${SLURM_JOB_NUM_NODES:-1}
    ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    if [ -z "$ranks" ]; then
        echo "this allocation has no GPUs; sbatch --gpus-per-node 8 works, or RANKS_PER_NODE=8 where SLURM" \
            "does not count them" >&2
        exit 2
    fi
    world=$((nodes * ranks))
    gpus=(${SLURM_GPUS_ON_NODE:+--gpus-per-node="$SLURM_GPUS_ON_NODE"}) # a step has none by itself
    # Launch order is execution order: collective, then work, then wait.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    local hosts
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
}

# lynx_once ARGUMENTS...: the lynx command once, where the ranks will be.
lynx_once() {
    srun --nodes 1 --ntasks 1 ${container[@]+"${container[@]}"} "$python" -m megatron_lynx "$@"
}

# lynx_flags RUN: Megatron's flags of a run (a name or file of configs/runs), into the array flags.
# Sizes that do not fit the allocation end here, with one line, before any GPU is used.
lynx_flags() {
    local text
    text=$(lynx_once args --run "$1" --world-size "$world")
    eval "flags=($text)" # quoted for a shell by lynx
    # Kernels of Apex, which Transformer Engine's layers do not need.
    [[ $text != *"--transformer-impl local"* ]] || flags+=(--no-persist-layer-norm --no-gradient-accumulation-fusion)
    [ "${MEGATRON_LYNX_CPU:-}" != 1 ] || flags+=(--distributed-backend gloo)
}

# lynx_ranks MODULE ARGUMENTS...: a Python module on every rank, one rank a GPU. SLURM's signals reach
# the ranks themselves: nothing stands between that would end them before they have saved.
lynx_ranks() {
    # shellcheck disable=SC2016  # expanded on the ranks
    srun --nodes "$nodes" --ntasks-per-node "$ranks" ${gpus[@]+"${gpus[@]}"} --kill-on-bad-exit=1 \
        ${container[@]+"${container[@]}"} bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID \
            WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE='"$ranks"'; exec "$@"' rank "$python" -m "$@"
}

# lynx_tokenizer SCRIPT FLAGS...: refuse Megatron's default tokenizer, which downloads its vocabulary:
# compute nodes have no network.
lynx_tokenizer() {
    if ! lynx_has --tokenizer-type "${@:2}"; then
        echo "$1 needs --tokenizer-type among Megatron's flags; GPT2BPETokenizer with --vocab-file and" \
            "--merge-file works, or NullTokenizer with --vocab-size" >&2
        exit 2
    fi
}

# lynx_saved CHECKPOINTS: the iteration of the last checkpoint, 0 if there is none.
lynx_saved() {
    local file=$1/latest_checkpointed_iteration.txt
    if [ -f "$file" ]; then cat "$file"; else echo 0; fi
}
