"""Two hosts on one machine: network namespaces joined by a cable of a chosen rate.

Each host is a network namespace of its own; a veth pair is the cable, and a token bucket on both
ends sets its rate. Needs root, ``ip`` and ``tc``. Without all that, ``LocalHosts`` runs the ranks
side by side over the loopback.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence

from megatron_lynx.errors import ConfigError

INTERFACE = "lynx0"
PREFIX = "lynx-bench-"
"""Namespaces begin with it, so that whatever is left over can be found: ``ip netns list``."""

_ADDRESS = "10.213.77."
_BURST = "256kb"
_LATENCY = "50ms"


class LocalHosts:
    """All ranks on this host, over the loopback."""

    link = "loopback"

    def command(self, rank: int) -> list[str]:
        """What stands before a rank's own command."""
        return []

    def environment(self) -> dict[str, str]:
        """Where the ranks meet."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}


class TwoHosts:
    """Two namespaces; ranks are dealt out in turn. Use ``two_hosts`` to make them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.link = "unlimited"

    def set_rate(self, rate: str) -> None:
        """Set the cable's rate: tc's notation, such as ``1gbit``; ``none`` for no limit."""
        for name in self.names:
            inside = ("ip", "netns", "exec", name, "tc", "qdisc")
            subprocess.run([*inside, "del", "dev", INTERFACE, "root"], check=False, capture_output=True)
            if rate != "none":
                bucket = ("tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
                _run(*inside, "add", "dev", INTERFACE, "root", *bucket)
        self.link = "unlimited" if rate == "none" else rate

    def command(self, rank: int) -> list[str]:
        """What stands before a rank's own command."""
        return ["ip", "netns", "exec", self.names[rank % len(self.names)]]

    def environment(self) -> dict[str, str]:
        """Where the ranks meet."""
        return {
            "MASTER_ADDR": f"{_ADDRESS}1",
            "MASTER_PORT": "29533",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }


def why_not() -> str | None:
    """Why this machine cannot make two hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{missing[0]} is not installed (iproute2)" if missing else None


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two joined hosts until the block ends, however it ends.

    Raises:
        ConfigError: the machine cannot make them.
    """
    reason = why_not()
    if reason is not None:
        raise ConfigError(f"--links: {reason}; --local works")
    names = [f"{PREFIX}{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        first, second = names
        peer = ("peer", "name", INTERFACE, "netns", second)
        _run("ip", "link", "add", INTERFACE, "netns", first, "type", "veth", *peer)
        for i, name in enumerate(names):
            inside = ("ip", "-n", name)
            _run(*inside, "addr", "add", f"{_ADDRESS}{i + 1}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run(*inside, "link", "set", device, "up")
        yield TwoHosts(names)
    finally:
        # Deleting a namespace takes its end of the cable, and so the cable, with it.
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        line = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigError(f"--links: `{' '.join(command)}` failed ({line}); --local works")
