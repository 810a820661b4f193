"""The window of SGLang versions that the adapter was tested with, and hooks that are known to have taken.

SGLang only logs a plugin or a hook that fails and serves on without it. Here either ends the process: an engine with
half an adapter would compute wrong tokens.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Literal

from kvlaunch.engines.compat import Window
from kvlaunch.errors import CompatibilityError

WINDOW = Window(engine="SGLang", distributions=("sglang",), low=(0, 5, 23), high=(0, 5, 24))

HookKind = Literal["before", "after", "around", "replace"]


def hook(targets: Mapping[str, tuple[HookKind, Callable[..., Any]]]) -> None:
    """Register hooks with SGLang's plugin framework, apply them, and see that each one took.

    Args:
        targets: dotted path of a function, method or class of SGLang -> how it is hooked, and with what.

    Raises:
        CompatibilityError: a target does not exist, or its hook did not take.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    before = {target: _found(target) for target in targets}
    for target, (kind, function) in targets.items():
        HookRegistry.register(target, function, HookType(kind))
    HookRegistry.apply_hooks()
    for target, old in before.items():
        if _found(target) is old:
            raise CompatibilityError(f"SGLang {WINDOW.installed()} did not take the hook on {target}.")


def _found(target: str) -> Any:
    path, _, name = target.rpartition(".")
    try:
        return inspect.getattr_static(pkgutil.resolve_name(path), name)
    except (ImportError, AttributeError):
        raise CompatibilityError(
            f"SGLang {WINDOW.installed()} has no {target}: the adapter does not know this build."
        ) from None
