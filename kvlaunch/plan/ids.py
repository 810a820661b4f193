"""Run ids."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlaunch.config.schema import LaunchConfig

MAX_LENGTH = 24
"""Characters: the id is part of every socket path, and those are short."""
_SUFFIX = 5
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


def slug(text: str, limit: int) -> str:
    """`text` with only letters, digits, `-` and `_`, at most `limit` characters, never empty."""
    cleaned = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")
    return cleaned[:limit].rstrip("-_") or "run"


def new_run_id(config: LaunchConfig) -> str:
    """A new run id: the run's name (else the model's), and a random end that keeps runs of one name apart.

    On several nodes it is the same on all of them: made from rdzv.id, else from the rendezvous' endpoint.
    """
    if config.nnodes > 1:
        shared = config.rdzv.id or f"{display_name(config)}@{config.rdzv.endpoint}"
        if slug(shared, MAX_LENGTH) == shared:
            return shared
        end = hashlib.sha256(shared.encode()).hexdigest()[:_SUFFIX]
        return f"{slug(config.rdzv.id or display_name(config), MAX_LENGTH - _SUFFIX - 1)}-{end}"
    stem = slug(display_name(config), MAX_LENGTH - _SUFFIX - 1)
    return f"{stem}-{''.join(secrets.choice(_ALPHABET) for _ in range(_SUFFIX))}"


def display_name(config: LaunchConfig) -> str:
    """Name of the run for `kvlaunch ps`: what the user gave, else the last part of the model's name."""
    return config.name or config.model.name.rstrip("/").rsplit("/", 1)[-1] or config.model.name


def meeting_point(config: LaunchConfig) -> str | None:
    """Where the nodes of this run meet, HOST:PORT; None for one node."""
    return config.rdzv.endpoint if config.nnodes > 1 else None
