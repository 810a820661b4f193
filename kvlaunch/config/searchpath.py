"""The folder given with --config-dir, put in front of Hydra's search path by a plugin, Hydra's own way to do so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

_folder: ContextVar[Path | None] = ContextVar("_folder", default=None)


class _OwnFolder(SearchPathPlugin):
    """Does nothing outside `own_folder`: Hydra keeps its plugins for the whole process."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = _folder.get()
        if folder is not None:
            search_path.prepend(provider="--config-dir", path=f"file://{folder}")


@contextmanager
def own_folder(folder: Path | None) -> Iterator[None]:
    """Within it, Hydra looks into `folder` first, then where it looks otherwise. None: no change."""
    if folder is not None:
        Plugins.instance().register(_OwnFolder)
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)
