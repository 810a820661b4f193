"""The secret of a run: who knows it may command the run's KV listeners, and is believed to be one.

The user shares it with the nodes, as a file or a variable. It never leaves a node: keys are derived from it
(kvlaunch/kv/ipc/roles.py), and only public keys, and what is sealed with the keys, go over the network.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvlaunch.env import SECRET
from kvlaunch.errors import ConfigError

LEAST_CHARACTERS = 32
"""Shorter ones are somebody's password: whoever records the traffic could try them all."""
_MOST_CHARACTERS = 1024
_RANDOM_BYTES = 32
HINT = f"kvlaunch secret new prints one: give every node the same, as {SECRET} or in the file rdzv.secret_file."


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret that is good enough to be used. Not shown where it is printed.

    Raises:
        ConfigError: it is too short, or no single printable word.
    """

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        text = self.text
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError("The run's secret must be one word of printable ASCII characters.", hint=HINT)
        if not LEAST_CHARACTERS <= len(text) <= _MOST_CHARACTERS:
            raise ConfigError(
                f"The run's secret has {len(text)} characters: it must have {LEAST_CHARACTERS} to {_MOST_CHARACTERS}.",
                hint=HINT,
            )


def save_secret(secret: Secret, path: Path) -> None:
    """Write it where only this user can read it."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as f:
        f.write(secret.text + "\n")


def new_secret() -> Secret:
    """256 bits from the operating system, as one word of 43 letters, digits, - and _."""
    return Secret(secrets.token_urlsafe(_RANDOM_BYTES))


def load_secret(file: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> Secret | None:
    """The secret that the user gave, or None where there is none.

    Args:
        file: value of `rdzv.secret_file`.

    Raises:
        ConfigError: the file cannot be read or others may read it, what it holds is no secret, or the variable says
            something else.
    """
    text = (os.environ if environ is None else environ).get(SECRET)
    given = Secret(text.strip()) if text else None
    if file is None:
        return given
    read = _read(Path(file).expanduser())
    if given is not None and given != read:
        raise ConfigError(
            f"{SECRET} and rdzv.secret_file={file} hold different secrets.", hint="Give only one of them."
        )
    return read


def require_secret(secret: Secret | None, what: str) -> Secret:
    """Raises ConfigError where there is none; `what` is what it is for."""
    if secret is None:
        raise ConfigError(f"{what} needs the run's secret, and none was given.", hint=HINT)
    return secret


def _read(path: Path) -> Secret:
    try:
        with open(path, encoding="ascii", errors="replace", opener=_open) as f:
            status = os.fstat(f.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"rdzv.secret_file={path}: it is no file.", hint=HINT)
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"rdzv.secret_file={path}: others may read or write it (mode {status.st_mode & 0o777:04o}).",
                    hint=f"Keep it to yourself: chmod 600 {path}; if it was open for long, make a new secret.",
                )
            return Secret(f.read(_MOST_CHARACTERS + 2).strip())
    except OSError as error:
        raise ConfigError(f"rdzv.secret_file={path}: it cannot be read: {error.strerror}.", hint=HINT) from error


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO without a writer does not keep us, and is refused
