"""Headless Chromium, driven over a pipe by its DevTools protocol. No driver, no further package.

Messages are JSON texts that end with a zero byte; Chromium reads them from file descriptor 3 and
answers on 4. Only what the tests need is here: open a page, evaluate, press keys, take pictures.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
    *("--remote-debugging-pipe", "--font-render-hinting=none"),
)
TIMEOUT_S = 120
"""For one answer; a loaded machine is slow to start a browser."""

KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def find_chromium() -> str:
    """The browser's path: ``LYNX_CHROMIUM``, or the first one found.

    Raises:
        RuntimeError: there is none; says how to get one.
    """
    named = os.environ.get("LYNX_CHROMIUM")
    for name in (named,) if named else NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise RuntimeError(
        "no Chromium found: the tests of the HTML page need one. Install it (Debian: apt-get update && "
        "apt-get install -y chromium; scripts/test.sh does that itself when run as root), or set "
        "LYNX_CHROMIUM to its path"
    )


class Browser:
    """One page in one browser. ``messages`` collects console output of level warning and up,
    uncaught exceptions and whatever was refused or failed to load."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._number, self._rest = 0, b""
        self._session: str | None = None
        self._loaded = False
        self.messages: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer.

        Raises:
            RuntimeError: the browser refused, or ended.
            TimeoutError: no answer in time.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self._number:
                self._event(answer)
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            result: dict[str, Any] = answer["result"]
            return result

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            if not select.select([self._back], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {TIMEOUT_S} s")
            chunk = os.read(self._back, 1 << 16)
            if not chunk:
                raise RuntimeError(f"Chromium ended with code {self._process.poll()}")
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _event(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method", ""), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.messages.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.messages.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def attach(self) -> None:
        """Take hold of the page that the browser opened, and listen."""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1320, height: int = 900) -> None:
        """Load a file and wait until its script has run to its end, or has failed."""
        self.size(width, height)
        self._loaded = False
        self.messages.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._event(self._read())

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Set the size of the view in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        """What the reader prefers: ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression.

        Raises:
            RuntimeError: it threw.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", expression))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: ``mouseMoved``, ``mousePressed``, ``mouseReleased`` or ``mouseWheel``."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self, path: Path) -> None:
        """Save what the view shows as PNG."""
        answer = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A running browser with an empty profile; it and its profile are gone afterwards."""
    chromium = find_chromium()
    to_browser, to = os.pipe()
    back, from_browser = os.pipe()
    # Away from 3 and 4, which the shell below gives to the browser.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser, from_browser)]
    for fd in (to_browser, from_browser):
        os.close(fd)
    with tempfile.TemporaryDirectory(prefix="lynx-chromium-", ignore_cleanup_errors=True) as folder:
        shell = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]} {theirs[0]}<&- {theirs[1]}>&-'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", chromium, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": folder},
        )
        for fd in theirs:
            os.close(fd)
        page = Browser(process, to, back)
        try:
            page.attach()
            yield page
        finally:
            _end(page, process)
            os.close(to)
            os.close(back)


def _end(page: Browser, process: subprocess.Popen[bytes]) -> None:
    """Close the browser; it ends its own helpers when it is asked to."""
    try:
        page._session = None
        page.call("Browser.close")
        process.wait(timeout=20)
    except (RuntimeError, OSError, TimeoutError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
