"""Device, Link and Cluster: rates from which times are estimated, as data.

A cluster is a TOML file (``configs/clusters``). A figure is a number, or a table of the number and
where it comes from::

    peak_tflops = { value = 312, source = "vendor: dense bf16" }

Rates are stored as whole numbers per second; every time that leaves this module is an integer of
nanoseconds, rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from megatron_lynx.errors import ConfigError
from megatron_lynx.units import GIB, MIB

MEASURE = "measure"
"""What a cluster file says where no public figure is agreed upon and its user has to measure."""

_SPARSE_TFLOPS = {
    624.0: 312,
    1248.0: 312,
    1513.0: 756,
    1978.0: 989,
    1979.0: 989,
    3958.0: 989,
    4500.0: 2250,
    5000.0: 2500,
}
"""Peak rates that vendors print for 2:4-sparse (or fp8) matrices, and the dense bf16 rate of the
same device. A dense GEMM never reaches the former."""

_LINKS = ("node", "network")

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.85))
"""Rows and columns of the tiles of a product, and the share of the rate that each shape reaches."""
PROLOGUE = 160
"""Steps in k that a tile's start and end take. With these, the 114 forward and input-gradient products that
SimuMax measured on A100 (``configs/system/a100_pcie.json``) are within 6.5 % of 0.79 of the peak (one
standard deviation), its weight gradients within 6.2 % of 0.75."""


def _ns(amount: float, per_second: float) -> int:
    """Time in nanoseconds, rounded up, for ``amount`` at ``per_second``."""
    return -int(-amount * 1e9 // per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    ``flops_per_second`` is the peak dense rate of 16-bit matrix products, ``memory_bytes`` what a
    process can allocate, ``te_workspace_bytes`` what Transformer Engine keeps for its matrix products,
    ``bytes_per_second`` the peak rate of its memory, ``launch_ns`` what one
    kernel costs besides its work. The efficiencies are the shares of the peaks that large GEMMs,
    fused attention and elementwise kernels reach. ``host_bytes_per_second`` is the rate of the link to the
    host's memory, each way; 0 where it is not known.
    """

    name: str
    flops_per_second: int
    memory_bytes: int
    bytes_per_second: int
    launch_ns: int
    gemm_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    te_workspace_bytes: int = 32 * MIB
    wgrad_efficiency: float | None = None
    attention_backward_efficiency: float | None = None
    multiprocessors: int = 0
    host_bytes_per_second: int = 0

    def compute_ns(
        self,
        flops: int,
        size_bytes: int,
        *,
        attention: bool = False,
        backward: bool = False,
        gemm: tuple[int, int, int] | None = None,
    ) -> int:
        """Roofline time of one kernel: the longer of its arithmetic and its memory traffic.

        ``launch + max(flops / (peak * efficiency), bytes / (bandwidth * efficiency))``. The efficiency of
        a product (``gemm`` is its m, n, k) is that of large ones times ``filled``. ``backward``: attention's
        backward, or a product that makes a weight gradient.
        """
        if attention:
            share = (self.attention_backward_efficiency if backward else None) or self.attention_efficiency
        else:
            share = (self.wgrad_efficiency if backward else None) or self.gemm_efficiency
        if gemm is not None:
            share *= self.filled(*gemm)
        arithmetic = _ns(flops, self.flops_per_second * share)
        traffic = _ns(size_bytes, self.bytes_per_second * self.memory_efficiency)
        return self.launch_ns + max(arithmetic, traffic)

    def filled(self, m: int, n: int, k: int) -> float:
        """The share of a device that a product of [m, k] and [k, n] keeps busy: tiles of the output go to
        the multiprocessors in waves, of which the last may be half empty, and each tile starts with a
        prologue of ``PROLOGUE`` steps in k. The best of three shapes of a tile counts.

        After NVIDIA's guide to matrix multiplication (tile and wave quantisation); 1 if the number of
        multiprocessors is not given.
        """
        if not self.multiprocessors:
            return 1.0
        best = 0.0
        for rows, columns, share in TILES:
            waves = ceil(ceil(m / rows) * ceil(n / columns) / self.multiprocessors)
            best = max(best, share * m * n / (waves * self.multiprocessors * rows * columns))
        return best * k / (k + PROLOGUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between devices of a group.

    ``bytes_per_second`` is bus bandwidth per device as nccl-tests defines it (for an all-reduce:
    bytes * 2(n-1)/n / time), which equals what one point-to-point transfer gets. ``latency_ns``
    is the time of an empty collective. ``contention`` multiplies compute that runs meanwhile.
    """

    name: str
    bytes_per_second: int
    latency_ns: int
    contention: float = 1.0

    def all_reduce_ns(self, size_bytes: int, group: int) -> int:
        """``latency + 2(n-1)/n * bytes / bus bandwidth`` for a tensor of ``size_bytes``."""
        return self._collective_ns(2 * size_bytes, group)

    def gather_ns(self, size_bytes: int, group: int) -> int:
        """All-gather or reduce-scatter: ``latency + (n-1)/n * bytes / bus bandwidth``.

        ``size_bytes`` is the whole tensor, not the shard.
        """
        return self._collective_ns(size_bytes, group)

    def transfer_ns(self, size_bytes: int) -> int:
        """Point to point: ``latency + bytes / bandwidth``."""
        return self.latency_ns + _ns(size_bytes, self.bytes_per_second)

    def _collective_ns(self, size_bytes: int, group: int) -> int:
        if group < 2:
            return 0
        return self.latency_ns + _ns(size_bytes * (group - 1), self.bytes_per_second * group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The process that launches a device's kernels: Python, autograd and the driver.

    ``kernel_ns`` for each kernel of a layer, ``transfer_ns`` for each wait for a neighbour,
    ``step_ns`` for what comes once a step: data, gradient norm, optimizer, logging.
    """

    kernel_ns: int
    transfer_ns: int
    step_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices and the links between them.

    ``reserve_bytes`` is memory that training never gets: the runtime's context, communication
    buffers, fragmentation. ``sources`` maps ``section.figure`` to where the figure comes from.
    """

    name: str
    device: Device
    node: Link
    network: Link
    gpus_per_node: int
    reserve_bytes: int
    sources: Mapping[str, str]
    host: Host | None = None

    @property
    def budget_bytes(self) -> int:
        """Memory of a device that training may use."""
        return self.device.memory_bytes - self.reserve_bytes

    def tensor_link(self, tp: int) -> Link:
        """The link of a tensor-parallel group: inside a node if the group fits into one."""
        return self.node if tp <= self.gpus_per_node else self.network

    def pipeline_link(self, tp: int, dp: int, pp: int) -> Link:
        """The slowest link between neighbouring stages.

        Megatron's default order puts stages ``tp * dp`` ranks apart, so a pipeline stays inside a
        node only if all of it fits.
        """
        return self.node if tp * dp * pp <= self.gpus_per_node else self.network

    def data_link(self, tp: int, dp: int) -> Link:
        """The link of a data-parallel group, whose ranks stand ``tp`` apart."""
        return self.node if tp * dp <= self.gpus_per_node else self.network


@dataclass(slots=True)
class _Section:
    """A table of a cluster file, read figure by figure; names what is wrong and what would do."""

    file: str
    name: str
    table: Mapping[str, Any]
    sources: dict[str, str]

    def number(self, key: str, example: float, *, zero: bool = False, at_most: float = 1e9) -> float:
        where = f"{self.file}: {self.name}.{key}"
        if key not in self.table:
            raise ConfigError(f"{where} is missing; for example {key} = {example:g}")
        value = self.table[key]
        if isinstance(value, Mapping):
            self.sources[f"{self.name}.{key}"] = str(value.get("source", ""))
            value = value.get("value")
        if value == MEASURE:
            raise ConfigError(
                f"{where} has no agreed public value: measure it on your machine, put it into a copy "
                f"of the file, and pass that with --cluster FILE; for example {key} = {example:g}"
            )
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or value < 0 or value > at_most or (value == 0 and not zero):
            raise ConfigError(f"{where} {value!r} is not a number in range; {key} = {example:g} works")
        return float(value)

    def optional(self, key: str, example: float, *, at_most: float = 1) -> float | None:
        """A figure that may be left out."""
        return self.number(key, example, at_most=at_most) if key in self.table else None


def read_cluster(data: Mapping[str, Any], file: str) -> Cluster:
    """Make a Cluster of the contents of a cluster file; ``file`` is its name in errors.

    Raises:
        ConfigError: a section or a figure is missing, malformed, or still to be measured.
    """
    sources: dict[str, str] = {}
    sections: dict[str, _Section] = {}
    links = data.get("links", {})
    for name, table in (("device", data.get("device")), ("cluster", data.get("cluster"))):
        if not isinstance(table, Mapping):
            raise ConfigError(f"{file} has no [{name}] section; configs/clusters/toy.toml shows one")
        sections[name] = _Section(file, name, table, sources)
    for name in _LINKS:
        table = links.get(name) if isinstance(links, Mapping) else None
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{file} has no link [links.{name}]; for example "
                f"[links.{name}] bandwidth_gb_s = 200, latency_us = 20"
            )
        sections[name] = _Section(file, f"links.{name}", table, sources)
    whole = sections["cluster"]
    device = _read_device(sections["device"], str(data["device"].get("name", file)))
    reserve = round(whole.number("reserve_gib", 3, zero=True) * GIB)
    if reserve >= device.memory_bytes:
        raise ConfigError(f"{file}: cluster.reserve_gib takes all of device.memory_gib; 3 works")
    return Cluster(
        name=str(data.get("name", file)),
        device=device,
        node=_read_link(sections["node"]),
        network=_read_link(sections["network"]),
        gpus_per_node=int(whole.number("gpus_per_node", 8)),
        reserve_bytes=reserve,
        sources=sources,
        host=_read_host(_Section(file, "host", data["host"], sources)) if "host" in data else None,
    )


def _read_host(section: _Section) -> Host:
    return Host(
        kernel_ns=round(section.number("kernel_us", 80) * 1e3),
        transfer_ns=round(section.number("transfer_us", 500, zero=True) * 1e3),
        step_ns=round(section.number("step_ms", 15, zero=True) * 1e6),
    )


def _read_device(section: _Section, name: str) -> Device:
    tflops = section.number("peak_tflops", 312)
    if tflops in _SPARSE_TFLOPS:
        raise ConfigError(
            f"{section.file}: device.peak_tflops {tflops:g} is a figure for sparse matrices; "
            f"the dense bf16 rate is wanted: {_SPARSE_TFLOPS[tflops]} works"
        )
    return Device(
        name=name,
        flops_per_second=round(tflops * 1e12),
        memory_bytes=round(section.number("memory_gib", 80) * GIB),
        bytes_per_second=round(section.number("bandwidth_gb_s", 2000) * 1e9),
        launch_ns=round(section.number("launch_us", 4, zero=True) * 1e3),
        gemm_efficiency=section.number("gemm_efficiency", 0.6, at_most=1),
        attention_efficiency=section.number("attention_efficiency", 0.5, at_most=1),
        memory_efficiency=section.number("memory_efficiency", 0.8, at_most=1),
        te_workspace_bytes=round(section.number("te_workspace_mib", 32) * MIB),
        wgrad_efficiency=section.optional("wgrad_efficiency", 0.6),
        attention_backward_efficiency=section.optional("attention_backward_efficiency", 0.4),
        multiprocessors=int(section.optional("multiprocessors", 108, at_most=1e4) or 0),
        host_bytes_per_second=round((section.optional("host_gb_s", 25, at_most=1e6) or 0) * 1e9),
    )


def _read_link(section: _Section) -> Link:
    contention = section.number("contention", 1.2) if "contention" in section.table else 1.0
    if contention < 1:
        raise ConfigError(f"{section.file}: {section.name}.contention is below 1; 1.2 works")
    return Link(
        name=str(section.table.get("name", section.name)),
        bytes_per_second=round(section.number("bandwidth_gb_s", 200) * 1e9),
        latency_ns=round(section.number("latency_us", 20, zero=True) * 1e3),
        contention=contention,
    )
