"""An adapter and the versions of its engine that it was tested with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvlaunch.errors import CompatibilityError

Release = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The versions of an engine that its adapter knows."""

    engine: str
    """The engine's name in sentences, `vLLM`."""
    distributions: tuple[str, ...]
    """Names under which it may be installed."""
    low: Release
    """Lowest release that was tested."""
    high: Release
    """The first that was not; as long as `low`."""

    def installed(self) -> str | None:
        for name in self.distributions:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None

    def check(self, found: str | None = None) -> None:
        """Raises CompatibilityError, naming both versions, outside the window.

        Args:
            found: the version, by default the installed one.
        """
        found = found or self.installed()
        if found is None:
            raise CompatibilityError(f"{self.engine} is not installed in this environment.")
        try:
            release = tuple(int(part) for part in found.split("+")[0].split(".")[: len(self.low)])
        except ValueError:
            release = (0,)
        if not self.low <= release < self.high:
            raise CompatibilityError(
                f"{self.engine} {found} is installed; this kvlaunch was tested with {self.engine} >= "
                f"{_dotted(self.low)}, < {_dotted(self.high)}.",
                hint="Install a version inside the window, or a kvlaunch that knows this one.",
            )

    def seam(self, owner: Any, name: str) -> Any:
        """An attribute of the engine that the adapter builds on. Raises CompatibilityError where it is not there."""
        try:
            return getattr(owner, name)
        except AttributeError:
            raise CompatibilityError(
                f"{self.engine} {self.installed()} has no {name} in {getattr(owner, '__name__', owner)!s}: "
                "the adapter does not know this build."
            ) from None


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))
