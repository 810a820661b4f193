"""Where the config groups lie and which choices they offer: plain file names, no Hydra, so that completion is quick."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvlaunch.config.keys import GROUPS, PRESET
from kvlaunch.errors import ConfigError


def shipped_dir() -> Path:
    """The folder of kvlaunch's own groups: `kvlaunch/_conf` in an installed wheel, `conf` at the top of a checkout.

    Raises:
        ConfigError: neither is there; the installation is broken.
    """
    package = Path(__file__).resolve().parent.parent
    for place in (package / "_conf", package.parent / "conf"):
        if (place / "config.yaml").is_file():
            return place
    raise ConfigError(
        f"kvlaunch's config groups are missing: neither {package / '_conf'} nor {package.parent / 'conf'} is there.",
        hint="The installation is incomplete; install kvlaunch again.",
    )


def user_dir(folder: Path | None) -> Path | None:
    """The folder given with --config-dir, absolute.

    Raises:
        ConfigError: it is not there, or not a folder.
    """
    if folder is None:
        return None
    absolute = folder.expanduser().absolute()
    if not absolute.is_dir():
        what = "is not a folder" if absolute.exists() else "does not exist"
        raise ConfigError(
            f"--config-dir {folder}: {what}.",
            hint="It wants a folder that holds groups, for example DIR/model/mine.yaml or DIR/preset/mine.yaml.",
        )
    return absolute


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a group."""

    name: str
    path: Path
    own: bool
    """From --config-dir."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that one command sees."""

    shipped: Path
    own: Path | None

    @classmethod
    def at(cls, config_dir: Path | None) -> Groups:
        return cls(shipped_dir(), user_dir(config_dir))

    @property
    def roots(self) -> tuple[Path, ...]:
        """Most important first: the user's folder wins."""
        return (self.own, self.shipped) if self.own else (self.shipped,)

    def choices(self, group: str) -> dict[str, Choice]:
        """Name -> choice, sorted; a file of the user's hides kvlaunch's own of that name."""
        found: dict[str, Choice] = {}
        for root in self.roots:
            for path in (root / group).glob("*.yaml"):
                found.setdefault(path.stem, Choice(path.stem, path, own=root == self.own))
        return dict(sorted(found.items(), key=lambda item: _natural(item[0])))

    def all_choices(self) -> dict[str, dict[str, Choice]]:
        return {group: self.choices(group) for group in (*GROUPS, PRESET)}

    def defaults(self) -> dict[str, str | None]:
        """Group -> the choice that stands where none is made."""
        import yaml

        content = yaml.safe_load((self.shipped / "config.yaml").read_text(encoding="utf-8"))
        pairs = [next(iter(item.items())) for item in content["defaults"] if isinstance(item, dict)]
        return {group: choice for group, choice in pairs if group in GROUPS}

    def file(self, config_path: str) -> Path | None:
        """The file behind `model/Qwen3-8B`, as Hydra would find it."""
        return next((p for root in self.roots if (p := root / f"{config_path}.yaml").is_file()), None)

    def model_at(self, hub_id: str) -> str | None:
        """The choice of group model whose `path` is `hub_id`: its numbers are known without the network."""
        line = re.compile(rf"^path:\s*['\"]?{re.escape(hub_id)}['\"]?\s*(#.*)?$", re.MULTILINE)
        for choice in self.choices("model").values():
            if line.search(choice.path.read_text(encoding="utf-8")):
                return choice.name
        return None


def _natural(name: str) -> tuple[tuple[int, float, str], ...]:
    """Sort key under which Qwen3-4B comes before Qwen3-14B."""
    parts = re.findall(r"\d+(?:\.\d+)?|\D+", name)
    return tuple((0, float(p), "") if p[0].isdigit() else (1, 0.0, p.casefold()) for p in parts)
