"""Every error that kvlaunch reports to a person, with its exit code.

    KVLaunchError            1   the root; raised itself only for what fits nowhere below
    ├── ConfigError          2   what was asked is not possible as written (found before anything starts)
    ├── PlanError            3   what was asked cannot be placed or does not fit the model
    ├── RendezvousError      4   the nodes did not find each other in time
    ├── EngineError          5   the engine failed; carries the first failed rank and its log tail
    ├── KVCommitError        6   an operation on the KV cache could not be applied on every rank
    ├── BudgetExhausted      7   no memory is left in the budget that was asked for
    ├── CompatibilityError   8   an engine version or option outside what was tested
    └── RunNotFoundError     9   no such run

The exit codes are stable: scripts may rely on them.
"""

from __future__ import annotations

from collections.abc import Mapping


class KVLaunchError(Exception):
    """An error with a message for the user: what was asked, what is the matter, what to do.

    Args:
        message: what was asked and what is the matter, one or two sentences.
        hint: what to do about it, or None where the message says it all.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class ConfigError(KVLaunchError):
    exit_code = 2


class PlanError(KVLaunchError):
    exit_code = 3


class RendezvousError(KVLaunchError):
    exit_code = 4


class EngineError(KVLaunchError):
    """The engine failed.

    Args:
        rank: global rank that failed first, or None where it was no rank (the API process, say).
        log_path: file with the whole story.
        log_tail: its last lines.
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        rank: int | None = None,
        log_path: str | None = None,
        log_tail: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.log_path = log_path
        self.log_tail = log_tail


class KVCommitError(KVLaunchError):
    """An operation on the KV cache was applied on no rank.

    Args:
        failures: global rank -> the reason that rank gave (or that is known of it).
        settled: every rank is known to be as it was before. Else a rank that did not answer may have applied the
            operation; it is taken back before the next one.
    """

    exit_code = 6

    def __init__(
        self, message: str, *, failures: Mapping[int, str], hint: str | None = None, settled: bool = True
    ) -> None:
        super().__init__(message, hint=hint)
        self.failures = dict(failures)
        self.settled = settled


class BudgetExhausted(KVLaunchError):
    exit_code = 7


class CompatibilityError(KVLaunchError):
    exit_code = 8


class RunNotFoundError(KVLaunchError):
    exit_code = 9
