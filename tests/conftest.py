"""What holds for every test: fixed random examples, and no silent skips."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Fixed examples and no deadline: a run on a busy machine must not differ from one on a quiet one.
settings.register_profile("lynx", derandomize=True, deadline=None)
settings.load_profile("lynx")

_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember tests that were skipped although they need no GPU."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _remember(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file can skip itself while it is collected."""
    if report.skipped:
        _remember(report.nodeid)


def _remember(nodeid: str) -> None:
    if not nodeid.startswith("tests/gpu"):
        _skipped.append(nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the run: a skipped test proves nothing, and nobody reads a green run."""
    if _skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why the run failed."""
    for nodeid in _skipped:
        terminalreporter.write_line(f"skipped outside tests/gpu, which fails the run: {nodeid}", red=True)
