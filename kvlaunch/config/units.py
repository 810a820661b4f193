"""Byte sizes as people write them."""

from __future__ import annotations

import math
import re

from kvlaunch.errors import ConfigError

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SIZE = re.compile(
    r"\s*(\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE]([+-]?\d{1,2}))?\s*(?:([KMGTP]?)(i?)(B?))?\s*", re.IGNORECASE
)
EXAMPLES = "2GiB, 512MiB, 1.5GiB, 10GB or a number of bytes"


def parse_bytes(value: str | int | float, *, what: str = "a size") -> int:
    """The number of bytes that `value` says.

    `GiB` (also `Gi`, and a bare `G`) is 2**30 bytes, `GB` is 10**9; the same for K, M, T, P; case does not matter.

    Args:
        value: bytes, or a string such as `2GiB`, `1.5GiB`, `1e9`.
        what: the setting, for the message.

    Raises:
        ConfigError: not a size, negative, or not a whole number of bytes.
    """
    if isinstance(value, bool):
        raise _bad(value, what)
    if isinstance(value, int | float):
        if value < 0 or not math.isfinite(value) or value != int(value):
            raise _bad(value, what)
        return int(value)
    match = _SIZE.fullmatch(value)
    if match is None:
        raise _bad(value, what)
    number, exponent, prefix, binary, unit = match.groups()
    # A bare "G" is what `top`, `free` and the engines call a GiB.
    factor = (_DECIMAL if unit and not binary else _BINARY)[(prefix or "").upper()]
    if binary and not prefix:
        raise _bad(value, what)
    whole, _, fraction = number.replace("_", "").partition(".")
    # Integers throughout: 0.1GB is exactly 100,000,000 bytes, and no large size loses its low digits.
    total, shift = int((whole + fraction) or "0") * factor, int(exponent or "0") - len(fraction)
    if shift >= 0:
        return total * int("1" + "0" * shift)
    total, rest = divmod(total, int("1" + "0" * -shift))
    if rest and factor == 1:
        raise _bad(value, what)
    return total


def format_bytes(count: int) -> str:
    """`count` bytes for a person: exact where a binary unit divides it (`2GiB`), else two decimals (`1.53GiB`)."""
    if count < 0:
        return f"-{format_bytes(-count)}"
    unit, size = "B", 1
    for prefix in ("K", "M", "G", "T", "P"):
        if count < _BINARY[prefix]:
            break
        unit, size = f"{prefix}iB", _BINARY[prefix]
    if count % size == 0:
        return f"{count // size}{unit}"
    return f"{count / size:.2f}{unit}"


def exact_bytes(count: int) -> str | int:
    """`count` as the largest binary unit that divides it (`1536MiB`), or the number itself below 1 KiB or odd."""
    for prefix in ("P", "T", "G", "M", "K"):
        if count and count % _BINARY[prefix] == 0:
            return f"{count // _BINARY[prefix]}{prefix}iB"
    return count


def _bad(value: object, what: str) -> ConfigError:
    return ConfigError(f"{what} wants a size in bytes, got {str(value)!r}.", hint=f"Write {EXAMPLES}.")
