"""An engine's command-line options as kvlaunch sees them: whose they are, what is refused, how they are written."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvlaunch.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRules:
    """What an engine's options mean to kvlaunch. Names are spelled with underscores."""

    engine: str
    """The engine's name in sentences, `vLLM`."""
    owned: Mapping[str, str]
    """Options that kvlaunch sets itself -> the setting of kvlaunch to use."""
    never: Mapping[str, str]
    """Options that no run can take -> why."""
    not_elastic: Mapping[str, str]
    """Options that kv=elastic cannot do yet -> why."""
    parts: Collection[str] = ()
    """Of the refused ones, numbers of parallel parts: 1 is as good as unset."""

    def check(self, args: Mapping[str, Any], *, elastic: bool) -> None:
        """Refuse options that kvlaunch owns or cannot do, by name.

        Raises:
            PlanError
        """
        for name, value in args.items():
            if name in self.owned:
                raise PlanError(
                    f"engine.args.{name}: kvlaunch sets this option of {self.engine} itself.",
                    hint=f"Use {self.owned[name]}=... instead.",
                )
            if self.is_off(name, value):
                continue
            if name in self.never:
                raise PlanError(
                    f"engine.args.{name}={value}: {self.never[name]}.", hint=f"Leave engine.args.{name} out."
                )
            if elastic and name in self.not_elastic:
                raise PlanError(
                    f"engine.args.{name} does not work with kv=elastic yet: {self.not_elastic[name]}.",
                    hint=f"Leave engine.args.{name} out, or use kv=static.",
                )

    def is_off(self, name: str, value: Any) -> bool:
        """True where the option is as good as unset: null, a flag that is off, a number of parallel parts that is 1."""
        if value is None or value is False:
            return True
        return type(value) is int and (value == 0 or (value == 1 and name in self.parts))


def render(args: Mapping[str, Any], *, negate: bool) -> list[str]:
    """Options as a command line wants them.

    `max_model_len: 4096` becomes `--max-model-len 4096`; true a bare flag; null nothing; a mapping JSON; a list several
    values after the option.

    Args:
        negate: false becomes `--no-...`, for an engine whose flags have such a form; else nothing.
    """
    argv: list[str] = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                argv.append(f"--{flag}")
            case False:
                argv += [f"--no-{flag}"] if negate else []
            case Mapping():
                argv += [f"--{flag}", json.dumps(value)]
            case list() | tuple():
                argv += [f"--{flag}", *(item if isinstance(item, str) else json.dumps(item) for item in value)]
            case _:
                argv += [f"--{flag}", str(value)]
    return argv


def kv_dtype_bytes(args: Mapping[str, Any], model_dtype_bytes: int, known: Mapping[str, int]) -> int:
    """Bytes of one element of the KV cache, by `kv_cache_dtype`.

    Args:
        known: dtype -> bytes of an element, for those whose blocks hold keys and values alone.

    Raises:
        PlanError: another one.
    """
    dtype = args.get("kv_cache_dtype") or "auto"
    if dtype == "auto":
        return model_dtype_bytes
    if dtype not in known:
        raise PlanError(
            f"engine.args.kv_cache_dtype={dtype}: kvlaunch cannot compute the size of its blocks.",
            hint=f"Use one of auto, {', '.join(known)}.",
        )
    return known[dtype]
