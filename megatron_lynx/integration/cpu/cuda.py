"""What ``torch.cuda`` means on a machine without a GPU: the stand-ins that the CPU backend puts there.

A CPU has one queue of work, the program itself, so a stream is a name without effect: what was
called earlier has finished earlier, every wait is already satisfied, and an event is a time.
Memory figures are those of this process. Random state is that of torch's CPU generator.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


# --- streams and events ------------------------------------------------------------------------


class Event:
    """A moment of the program; ``elapsed_time`` is in milliseconds, as in ``torch.cuda.Event``."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._recorded_ns: int | None = None

    def record(self, stream: object = None) -> None:
        """Remember the time of now."""
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: object = None) -> None:
        """All work before the event is done already."""

    def synchronize(self) -> None:
        """All work before the event is done already."""

    def query(self) -> bool:
        """Whether all work before the event is done: always."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        if self._recorded_ns is None or end_event._recorded_ns is None:
            raise RuntimeError("elapsed_time of an event that was not recorded; call record() on both first")
        return (end_event._recorded_ns - self._recorded_ns) / 1e6


class Stream:
    """A queue of work that has always finished; see the module's docstring."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, device: object = None, priority: int = 0, **_ignored: object) -> None:
        self.priority = priority
        self.device = torch.device("cpu")

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority: there is but one."""
        return (0, 0)

    def wait_event(self, event: object) -> None:
        """Every event has passed already."""

    def wait_stream(self, stream: object) -> None:
        """Every stream has finished already."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, now."""
        event = event if event is not None else Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """The stream has finished already."""

    def query(self) -> bool:
        """Whether the stream has finished: always."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None


_THE_STREAM = Stream()


def current_stream(device: object = None) -> Stream:
    """The one stream there is."""
    return _THE_STREAM


def default_stream(device: object = None) -> Stream:
    """The one stream there is."""
    return _THE_STREAM


def set_stream(stream: object) -> None:
    """Streams have no effect."""


class stream_context:  # noqa: N801 (stands in for the function-like ``torch.cuda.stream``)
    """``with torch.cuda.stream(s)``: the body runs in program order."""

    def __init__(self, stream: object) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_exc: object) -> None:
        return None


class device_context:  # noqa: N801 (stands in for the function-like ``torch.cuda.device``)
    """``with torch.cuda.device(d)``: there is but one device."""

    def __init__(self, device: object) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_exc: object) -> None:
        return None


def synchronize(device: object = None) -> None:
    """All work is done when the call before this one has returned."""


def is_current_stream_capturing() -> bool:
    """There are no graphs to capture into."""
    return False


# --- the device --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """The fields of a CUDA device's properties that Megatron reads; memory in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


# Compute capability 8.0: the least one with bf16 for which Megatron still asserts
# CUDA_DEVICE_MAX_CONNECTIONS=1, so that a job on CPU is held to the same rules as one on a GPU.
_CAPABILITY = (8, 0)


def is_available() -> bool:
    """Megatron asks this to know whether it may train."""
    return True


def is_initialized() -> bool:
    """There is no context to create."""
    return True


def current_device() -> int:
    """The index of the one device."""
    return 0


def device_count() -> int:
    """One device for each process, however many ranks share the machine."""
    return 1


def set_device(device: object) -> None:
    """There is but one device."""


def get_device_capability(device: object = None) -> tuple[int, int]:
    """See ``_CAPABILITY``."""
    return _CAPABILITY


def get_device_name(device: object = None) -> str:
    """The name shown in logs."""
    return "CPU (megatron_lynx)"


def get_device_properties(device: object = None) -> DeviceProperties:
    """This machine, in the fields of a CUDA device."""
    return DeviceProperties(
        name=get_device_name(),
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_machine_bytes(),
        multi_processor_count=os.cpu_count() or 1,
    )


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """torch's CPU kernels take bf16."""
    return True


def ignore(*_args: object, **_kwargs: object) -> None:
    """Does nothing (caches to empty, profiler ranges to open)."""


# --- memory, in bytes --------------------------------------------------------------------------


def _machine_bytes() -> int:
    return _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return _PAGE_BYTES * int(statm.read().split()[1])
    except OSError:  # not Linux: the peak is the best figure at hand
        return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_in_use(device: object = None) -> int:
    """Bytes of this process that are in memory, weights and Python included."""
    return _resident_bytes()


def memory_peak(device: object = None) -> int:
    """The most bytes that this process ever had in memory."""
    return _peak_resident_bytes()


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Free and total bytes of the machine."""
    return _PAGE_BYTES * os.sysconf("SC_AVPHYS_PAGES"), _machine_bytes()


def memory_stats(device: object = None) -> dict[str, int]:
    """The entries of ``torch.cuda.memory_stats`` that Megatron logs."""
    now, peak = _resident_bytes(), _peak_resident_bytes()
    stats = {"allocation.all.current": 0, "num_alloc_retries": 0, "num_ooms": 0}
    for kind in ("allocated", "reserved", "active", "requested"):
        stats[f"{kind}_bytes.all.current"] = now
        stats[f"{kind}_bytes.all.peak"] = peak
    return stats


# --- random state: the CPU generator is the device's generator ---------------------------------


def get_rng_state(device: object = "cuda") -> torch.Tensor:
    """The state of the generator that dropout draws from."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    """Set the state of the generator that dropout draws from."""
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """One state for each device: one."""
    return [get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """One state for each device: one."""
    for state in new_states:
        set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Seed the generator that dropout draws from."""
    torch.default_generator.manual_seed(int(seed))


def initial_seed() -> int:
    """The seed that the generator was last given."""
    return torch.default_generator.initial_seed()


def lazy_call(callback: Callable[[], Any], **_kwargs: object) -> None:
    """There is no context to wait for: call at once."""
    callback()


@contextlib.contextmanager
def nvtx_range(message: str, *_args: object, **_kwargs: object) -> Iterator[None]:
    """A profiler's range that nothing records."""
    yield


def attributes() -> dict[str, object]:
    """Every replaced attribute by its dotted path below ``torch.cuda``.

    A replaced function must be an object of its own: torch's compiler keeps a table of the
    functions it knows by identity, and stops at one object under two names. Hence ``_own``.
    """
    table: dict[str, object] = {
        "is_available": is_available,
        "is_initialized": is_initialized,
        "current_device": current_device,
        "device_count": device_count,
        "set_device": set_device,
        "get_device_capability": get_device_capability,
        "get_device_name": get_device_name,
        "get_device_properties": get_device_properties,
        "is_bf16_supported": is_bf16_supported,
        "synchronize": synchronize,
        "is_current_stream_capturing": is_current_stream_capturing,
        "Stream": Stream,
        "Event": Event,
        "stream": stream_context,
        "device": device_context,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "mem_get_info": mem_get_info,
        "memory_stats": memory_stats,
        "default_generators": (torch.default_generator,),
        "_lazy_call": lazy_call,
        "nvtx.range": nvtx_range,
    }
    for name in ("memory_allocated", "memory_reserved", "device_memory_used"):
        table[name] = _own(memory_in_use)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        table[name] = _own(memory_peak)
    for name in (
        "_lazy_init",
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "nvtx.range_push",
        "nvtx.range_pop",
    ):
        table[name] = _own(ignore)
    for module in ("", "random."):
        table[f"{module}get_rng_state"] = _own(get_rng_state)
        table[f"{module}set_rng_state"] = _own(set_rng_state)
        table[f"{module}get_rng_state_all"] = _own(get_rng_state_all)
        table[f"{module}set_rng_state_all"] = _own(set_rng_state_all)
        table[f"{module}manual_seed"] = _own(manual_seed)
        table[f"{module}manual_seed_all"] = _own(manual_seed)
        table[f"{module}initial_seed"] = _own(initial_seed)
    for dtype in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Char", "Bool"):
        table[f"{dtype}Tensor"] = getattr(torch, f"{dtype}Tensor")
    return table


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    replacement.__doc__ = function.__doc__
    return replacement
