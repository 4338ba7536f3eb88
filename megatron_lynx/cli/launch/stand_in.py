"""What stands in for launchers while a script is captured. Runs as a program: the standard library only.

``stand_in.py NAME ARGUMENTS`` starts nothing. It records what NAME was asked to start as one line of
JSON, and follows wrappers (``srun``, ``docker run``, ``bash -c``) to the command inside, so that each
record knows what it stands in. Names in ``RECORDED`` are recorded, ``WRAPPERS`` followed, ``PREFIXES``
left out; ``.unknown`` is what a restricted capture uses for everything else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

RECORDED = ("torchrun", "deepspeed", "accelerate")
WRAPPERS = (
    "srun",
    "mpirun",
    "mpiexec",
    "docker",
    "podman",
    "singularity",
    "apptainer",
    "enroot",
    "ray",
    "nsys",
)
PREFIXES = (
    *("numactl", "taskset", "nohup", "nice", "ionice", "stdbuf", "setsid", "timeout", "time", "ssh"),
    *("uv", "conda", "micromamba", "poetry", "pixi"),
)
PYTHONS = ("python", "python3", "python2")
SHELLS = ("sh", "dash", "zsh")
STAND_INS = (*RECORDED, *WRAPPERS, *PREFIXES, *PYTHONS, *SHELLS, "sbatch", "scontrol")

UNKNOWN = "LYNX_UNKNOWN"
"""What a program that was not run would have printed."""

_KEPT = re.compile(
    r"(WORLD_SIZE|NNODES|NPROC_PER_NODE|PET_\w+|SLURM_\w+|OMPI_COMM_\w+|PMI_SIZE|NVTE_\w+|(TORCH_)?NCCL_\w+|"
    r"GLOO_\w+|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|"
    r"PYTORCH_CUDA_ALLOC_CONF|OMP_NUM_THREADS|MEGATRON_LYNX_CPU)"
)
_DISTRIBUTED = re.compile(r"torch\.distributed\.(run|launch)")
_TRAINS = re.compile(r"(^|/)(pretrain|train|finetune|run_)[^/]*\.py$")
_FLAGS = (
    "--num-layers",
    "--hidden-size",
    "--tensor-model-parallel-size",
    "--use-checkpoint-args",
    "--yaml-cfg",
)


def name_of(word: str) -> str:
    """The program that a word names: its path left out, and a version after ``python``."""
    name = word.rsplit("/", 1)[-1]
    return "python" if re.fullmatch(r"python[0-9.]*", name) else name


def inner_command(words: Sequence[str]) -> list[str]:
    """The command that a wrapper's words contain: from the first word that names a program we follow."""
    followed = {*RECORDED, *WRAPPERS, *PREFIXES, *SHELLS, "python", "bash", "env"}
    for i, word in enumerate(words):
        if name_of(word) in followed or (
            word.endswith((".sh", ".slurm", ".sbatch")) and os.path.isfile(word)
        ):
            return list(words[i:])
    return []


def trains(words: Sequence[str]) -> bool:
    """Whether a Python command line (without ``python``) trains, or at least speaks Megatron's flags."""
    if any(_DISTRIBUTED.fullmatch(word) for word in words[:8]):
        return True
    if "-c" in words[:4]:
        return False
    if any(word.split("=")[0] in _FLAGS for word in words):
        return True
    script = next((word for word in words if not word.startswith("-")), "")
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return bool(_TRAINS.search(script)) or module.startswith("megatron_lynx")


def sbatch_lines(text: str) -> list[str]:
    """The options in a script's ``#SBATCH`` lines, which end at its first command."""
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            words += line[len("#SBATCH") :].split("#")[0].split()
        elif line.strip() and not line.startswith("#"):
            break
    return words


_LONG = {
    "-N": "nodes",
    "-n": "ntasks",
    "-G": "gpus",
    "-c": "cpus-per-task",
    "-J": "job-name",
}
_SIZES = ("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gres", "cpus-per-task", "job-name")


def slurm_options(words: Sequence[str]) -> dict[str, str]:
    """The sizes among the options of ``srun`` or ``sbatch``, by long name."""
    found: dict[str, str] = {}
    for i, word in enumerate(words):
        short = _LONG.get(word[:2]) if word[:1] == "-" and word[:2] != "--" else None
        if short:
            found[short] = word[2:].lstrip("=") or (words[i + 1] if i + 1 < len(words) else "")
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name in _SIZES:
                found[name] = value if equals else (words[i + 1] if i + 1 < len(words) else "")
    return found


def slurm_environment(options: Mapping[str, str]) -> dict[str, str]:
    """What SLURM sets for a job of so many nodes and tasks; nothing for what is not said."""
    nodes = options.get("nodes", "").split("-")[-1]
    per_node, tasks = options.get("ntasks-per-node", ""), options.get("ntasks", "")
    if not tasks and nodes.isdigit() and per_node.isdigit():
        tasks = str(int(nodes) * int(per_node))
    gres = re.search(r"gpu(?::[a-zA-Z]\w*)*:(\d+)", options.get("gres", ""))
    gpus = re.search(r"(\d+)$", options.get("gpus-per-node", ""))
    here = gpus or gres
    sizes = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_GPUS_PER_NODE": options.get("gpus-per-node", ""),
        "SLURM_GPUS_ON_NODE": here.group(1) if here else "",
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task", ""),
        "SLURM_JOB_NAME": options.get("job-name", ""),
        "SLURM_JOB_NODELIST": f"node-[0-{int(nodes) - 1}]" if nodes.isdigit() else "",
    }
    return {name: value for name, value in sizes.items() if value}


JOB = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOBID": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
"""What every SLURM job has."""


def without_writes(text: str) -> str:
    """A simple command as bash prints it, with its output sent to /dev/null where it went to a file.

    Copies of descriptors (``2>&1``) stay. Quotes and substitutions are passed over whole.
    """
    out, i = "", 0
    while i < len(text):
        c = text[i]
        if c == "\n" and "<<" in out:
            return out + text[i:]  # the text of a here document
        if c != ">" or out.endswith(("<", "=")):
            end = _piece(text, i)
            out, i = out + text[i:end], end
            continue
        i += 1
        sign = ">"
        while i < len(text) and text[i] in ">|&":
            sign, i = sign + text[i], i + 1
        start = i
        while start < len(text) and text[start] in " \t":
            start += 1
        end = start
        while end < len(text) and text[end] not in " \t\n;|&<>":
            end = _piece(text, end)
        if text[start : start + 2] == ">(":
            end = _piece(text, start + 1)
        word = text[start:end]
        copies = sign == ">&" and (word.isdigit() or word == "-")
        out, i = out + (f">&{word}" if copies else f"{sign} /dev/null"), end
    return out


def _piece(text: str, i: int) -> int:
    """Where the quoted string, substitution or single character at ``i`` ends."""
    c = text[i]
    if c == "\\":
        return min(len(text), i + 2)
    if c == "'":
        end = text.find("'", i + 1)
        return len(text) if end < 0 else end + 1
    if c in '"`':
        j = i + 1
        while j < len(text) and text[j] != c:
            j = _piece(text, j) if text[j] in "\\$" else j + 1
        return min(len(text), j + 1)
    opening = {"$(": ")", "${": "}"}.get(text[i : i + 2]) or (")" if c == "(" else None)
    if opening is None:
        return i + 1
    j = i + (1 if c == "(" else 2)
    while j < len(text) and text[j] != opening:
        j = _piece(text, j)
    return min(len(text), j + 1)


class Recorder:
    """Writes records, and runs on with what a wrapper contains."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.folder = self.environment["LYNX_CAPTURE"]
        self.restricted = self.environment.get("LYNX_RESTRICTED") == "1"
        self.within: list[list[str]] = json.loads(self.environment.get("LYNX_WITHIN", "[]"))

    def record(self, argv: Sequence[str]) -> int:
        """Add one launch."""
        kept = {name: value for name, value in self.environment.items() if _KEPT.fullmatch(name)}
        line = {"argv": list(argv), "within": self.within, "environment": kept, "folder": os.getcwd()}
        self._append("launches", json.dumps(line))
        return 0

    def _append(self, name: str, line: str) -> None:
        with open(os.path.join(self.folder, name), "a", encoding="ascii", errors="backslashreplace") as file:
            file.write(line + "\n")

    def skipped(self, words: Sequence[str]) -> int:
        """Note a program that was not run; where its output is read, say that it is unknown."""
        self._append("skipped", json.dumps(list(words)))
        if self._read():
            print(UNKNOWN)
        return 0

    def _read(self) -> bool:
        """Whether something reads our output."""
        here = os.fstat(1)
        return f"{here.st_dev}:{here.st_ino}" != self.environment.get("LYNX_STDOUT")

    def run(self, argv: Sequence[str]) -> int:
        """Go on with a command: a stand-in for it if there is one, else itself."""
        os.environ["LYNX_WITHIN"] = json.dumps(self.within)
        while argv and re.fullmatch(r"[A-Za-z_]\w*=.*", argv[0], re.DOTALL):
            name, _, value = argv[0].partition("=")
            os.environ[name], argv = value, argv[1:]
        if not argv:
            return 0
        found = shutil.which(argv[0]) or argv[0]
        stand_in = os.path.join(self.folder, "bin", name_of(argv[0]))
        if os.path.exists(stand_in):
            found = stand_in
        elif argv[0].endswith((".sh", ".slurm", ".sbatch")):
            return self.run(["bash", *argv])
        try:
            os.execve(found, [found, *argv[1:]], os.environ)
        except OSError:
            return self.skipped(argv) if self.restricted else 127

    def wrapper(self, name: str, words: Sequence[str]) -> int:
        """``srun`` and the like: go on with what is inside, once."""
        if name == "ray" and "--" in words:
            inner = list(words[words.index("--") + 1 :])
        elif name in ("docker", "podman") and words[:1] not in (["run"], ["exec"]):
            return self.skipped([name, *words])
        else:
            inner = inner_command(words)
        if not inner:
            print("node-0") if "hostname" in words else self.skipped([name, *words])
            return 0
        self.within.append([name, *words[: len(words) - len(inner)]])
        if name == "srun":
            os.environ.update({**JOB, **slurm_environment(slurm_options(self.within[-1]))})
        return self.run(inner)

    def sbatch(self, words: Sequence[str]) -> int:
        """``sbatch SCRIPT``: run the script in the environment of its job."""
        at = next((i for i, word in enumerate(words) if os.path.isfile(word)), None)
        if at is None:
            return self.batch(words)
        with open(words[at], encoding="utf-8", errors="replace") as file:
            options = {**slurm_options(sbatch_lines(file.read())), **slurm_options(words[:at])}
        os.environ.update({**JOB, **slurm_environment(options), "SLURM_SUBMIT_DIR": os.getcwd()})
        self.within.append(["sbatch", *words[:at]])
        return self.run(["bash", *words[at:]])

    def batch(self, words: Sequence[str]) -> int:
        """``sbatch`` of a command (``--wrap``), or of a script on standard input."""
        wrapped = next((w.partition("=")[2] for w in words if w.startswith("--wrap=")), None)
        text = f"{wrapped}\n" if wrapped else sys.stdin.read()
        if not text.strip():
            return self.skipped(["sbatch", *words])
        path = os.path.join(self.folder, f"batch.{os.getpid()}.sh")
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        return self.sbatch([*words, path])

    def python(self, name: str, words: Sequence[str]) -> int:
        """Record what trains; everything else runs, unless the capture is restricted."""
        if trains(words):
            return self.record([name, *words])
        if self.restricted:
            return self.skipped([name, *words])
        return self.real(name, words)

    def real(self, name: str, words: Sequence[str]) -> int:
        """The program itself, where PATH finds it besides the stand-ins."""
        own = os.path.join(self.folder, "bin")
        path = os.pathsep.join(p for p in os.environ.get("PATH", "").split(os.pathsep) if p != own)
        found = shutil.which(name, path=path)
        if found is not None:
            os.execve(found, [name, *words], os.environ)
        return self.skipped([name, *words])

    def nodes(self, words: Sequence[str]) -> int:
        """``scontrol show hostnames``: the nodes of the job, by made-up names."""
        count = self.environment.get("SLURM_NNODES", "")
        if "hostnames" not in words:
            return self.skipped(["scontrol", *words])
        print("\n".join(f"node-{i}" for i in range(int(count) if count.isdigit() else 1)))
        return 0


def main(argv: Sequence[str]) -> int:
    """Act as ``argv[0]``."""
    name, words = argv[0], list(argv[1:])
    recorder = Recorder(os.environ)
    if name == ".plain":
        sys.stdout.write(without_writes(words[0]))
        return 0
    if name == ".unknown":
        return recorder.skipped(words)
    if name in RECORDED:
        return recorder.record(argv)
    if name in PYTHONS:
        return recorder.python(name, words)
    if name == "sbatch":
        return recorder.sbatch(words)
    if name == "scontrol":
        return recorder.nodes(words)
    if name in SHELLS:
        return recorder.run(["bash", *words])
    if name in PREFIXES:
        inner = inner_command(words)
        if not inner:
            return recorder.skipped(argv) if recorder.restricted else recorder.real(name, words)
        return recorder.run(inner)
    return recorder.wrapper(name, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
