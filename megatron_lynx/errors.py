"""The exception tree.

LynxError                     anything a user can mend; a ``ValueError``
  ConfigError                 a flag, a field of a file or a combination of them is wrong
  InfeasibleError             no plan fits the memory; carries the smallest budget that would
  PlanError                   a plan file is malformed, or was made for another job
  InstallError                a name in Megatron that is to be replaced is missing or has changed
  RankError                   another rank failed by something that is none of these
  TapeError                   the training loop used a layer in a way that the tape cannot follow
"""

from __future__ import annotations

from collections.abc import Callable


class LynxError(ValueError):
    """Base of every error that a user of megatron_lynx can mend."""


class ConfigError(LynxError):
    """A flag or a field has a value that does not work, alone or beside another."""


class InfeasibleError(LynxError):
    """No plan fits the memory of a stage.

    Attributes:
        stage: pipeline rank that does not fit.
        budget_bytes: the memory that was offered.
        needed_bytes: the smallest memory with which some plan fits.
    """

    def __init__(self, message: str, *, stage: int, budget_bytes: int, needed_bytes: int) -> None:
        super().__init__(message)
        self.stage = stage
        self.budget_bytes = budget_bytes
        self.needed_bytes = needed_bytes

    def __reduce__(self) -> tuple[Callable[..., InfeasibleError], tuple[object, ...]]:
        # One rank plans and sends its error to the others.
        return _infeasible, (str(self), self.stage, self.budget_bytes, self.needed_bytes)


def _infeasible(message: str, stage: int, budget_bytes: int, needed_bytes: int) -> InfeasibleError:
    return InfeasibleError(message, stage=stage, budget_bytes=budget_bytes, needed_bytes=needed_bytes)


class PlanError(LynxError):
    """A plan is malformed, or does not belong to the job at hand."""


class InstallError(LynxError):
    """A target in Megatron is missing or has another signature than the one that was tested."""


class RankError(LynxError):
    """Another rank failed, by an error that is not lynx's own; the message has its text."""


class TapeError(LynxError):
    """A layer was used in a way that the tape cannot follow, such as a second backward pass."""
