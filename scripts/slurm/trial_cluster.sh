#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine, to try launch scripts on: Debian's slurmctld and slurmd
# (apt-get install slurm-wlm munge), root, everything in one folder. Each node has its own host name and
# job manager; its GPUs are null devices, so no rank can compute on one.
#
#   bash scripts/slurm/trial_cluster.sh up DIR      # afterwards: export SLURM_CONF=DIR/slurm.conf
#   bash scripts/slurm/trial_cluster.sh down DIR
#
# GPUS=2 CPUS=4: what each node says it has.
set -euo pipefail
gpus=${GPUS:-2} cpus=${CPUS:-4}

need() {
    local name
    for name in slurmctld slurmd sinfo munged unshare; do
        if ! command -v "$name" >/dev/null; then
            echo "$name is missing; Debian: apt-get install slurm-wlm munge" >&2
            return 2
        fi
    done
    if [ "$(id -u)" -ne 0 ]; then
        echo "root is needed: each node gets a host name of its own" >&2
        return 2
    fi
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

write_config() {
    local node
    for node in node1 node2; do
        mkdir -p "$dir/$node.spool"
        for ((i = 0; i < gpus; i++)); do
            mknod "$dir/$node.gpu$i" c 1 3 # as /dev/null; a device may be the GPU of one node only
        done
        echo "NodeName=$node Name=gpu File=$dir/$node.gpu[0-$((gpus - 1))]" >>"$dir/gres.conf"
    done
    # One address for both: srun listens where its host name points, and is answered where it called from.
    echo "127.0.0.1 localhost node1 node2" >"$dir/hosts"
    cat >"$dir/slurm.conf" <<CONF
ClusterName=trial
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmUser=root
AuthType=auth/munge
# A requeued job may start again when its old credential has run out: two minutes by default.
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/%n.spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
KillWait=5
InactiveLimit=0
MinJobAge=3600
SlurmdParameters=config_overrides
NodeName=node1 NodeAddr=127.0.0.1 NodeHostname=node1 Port=$(free_port) CPUs=$cpus RealMemory=1000 Gres=gpu:$gpus
NodeName=node2 NodeAddr=127.0.0.1 NodeHostname=node2 Port=$(free_port) CPUs=$cpus RealMemory=1000 Gres=gpu:$gpus
# A job of the second partition takes its nodes from those of the first, which are queued again.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=trial Nodes=node1,node2 Default=YES State=UP MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes=node1,node2 State=UP MaxTime=INFINITE PriorityTier=2
CONF
}

up() {
    if [ -n "$(ls -A "$dir" 2>/dev/null)" ]; then
        echo "$dir is not empty; a new folder works" >&2
        return 2
    fi
    mkdir -p "$dir/munge" "$dir/state"
    chmod 700 "$dir/munge"
    dir=$(cd "$dir" && pwd)
    write_config
    head -c 1024 /dev/urandom >"$dir/munge/key"
    chmod 600 "$dir/munge/key"
    munged --force --key-file "$dir/munge/key" --socket "$dir/munge/socket" --pid-file "$dir/munge/pid" \
        --log-file "$dir/munge/log" --seed-file "$dir/munge/seed" --num-threads 2
    export SLURM_CONF=$dir/slurm.conf
    slurmctld -c
    local node
    for node in node1 node2; do
        unshare --mount --uts bash -c "mount --bind '$dir/hosts' /etc/hosts && hostname $node && exec slurmd"
    done
    for _ in $(seq 60); do
        if [ "$(sinfo -h -N -o %t 2>/dev/null | sort -u)" = idle ]; then
            echo "export SLURM_CONF=$SLURM_CONF"
            return 0
        fi
        sleep 0.5
    done
    echo "the nodes did not come up; $dir/*.log says why" >&2
    tail -n 5 "$dir"/*.log >&2
    down
    return 1
}

# Ends the daemons, and with slurmd what it started; their logs stay.
down() {
    local file pid
    for file in "$dir"/node?.pid "$dir/slurmctld.pid" "$dir/munge/pid"; do
        [ -f "$file" ] || continue
        pid=$(cat "$file")
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 50); do
            kill -0 "$pid" 2>/dev/null || continue 2
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
}

if [ $# -ne 2 ] || [[ ! $1 =~ ^(up|down)$ ]]; then
    echo "trial_cluster.sh needs up|down DIR; for example up /tmp/trial" >&2
    exit 2
fi
dir=$2
need
"$1"
