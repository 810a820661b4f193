"""From overrides to one typed config: Hydra composes the groups, the schema checks every value."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlaunch.config import keys, overrides, values
from kvlaunch.config.groups import Groups
from kvlaunch.config.origins import Loaded, Origins
from kvlaunch.config.overrides import Request
from kvlaunch.config.schema import LaunchConfig
from kvlaunch.config.units import parse_bytes
from kvlaunch.config.validate import validate
from kvlaunch.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from omegaconf import DictConfig

_ROOT = "config"
_SCHEMA = "kvlaunch_schema"
_GIVEN_MODEL = "kvlaunch_given"


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed config and where each of its values came from."""

    config: LaunchConfig
    origins: Origins

    @property
    def container(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, sizes in bytes; the order is the schema's."""
        plain: dict[str, Any] = _plain(self.config)
        return plain

    def value(self, key: str) -> Any:
        """The value of a dotted key."""
        found: Any = self.container
        for part in key.split("."):
            found = found[part]
        return found

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from, in words: an override, a file, or `default`."""
        return self.origins.of(key)


def compose(texts: Sequence[str], *, config_dir: Path | None = None) -> Composed:
    """Compose overrides as typed on the command line into a checked config.

    Nothing is written anywhere, logging stays as it was, and Hydra's global state is put back.

    Args:
        texts: `KEY=VALUE` each; no quoting beyond the shell's own is needed.
        config_dir: folder with groups and presets of the user's own, which win over kvlaunch's.

    Raises:
        ConfigError: an unknown key or choice, a wrong type, an impossible value, or no model.
    """
    groups = Groups.at(config_dir)
    request = overrides.sort(texts, groups)
    with _hydra_errors(groups):
        cfg, loaded = _compose_groups(request, groups)
        _set_values(cfg, request)
        _require_model(cfg, groups)
    origins = Origins(loaded, request, groups)
    try:
        with _hydra_errors(groups):
            config = _typed(cfg)
        validate(config)
    except ConfigError as e:
        raise _with_file(e, origins) from None
    return Composed(config, origins)


def _with_file(error: ConfigError, origins: Origins) -> ConfigError:
    """The error, with the file that its key comes from where that is one of the user's."""
    key = re.match(r"[a-z_.]+", error.message)
    origin = origins.of(key[0]) if key and keys.find(key[0]) else ""
    return ConfigError(f"{origin}: {error.message}", hint=error.hint) if origin.startswith("/") else error


def _compose_groups(request: Request, groups: Groups) -> tuple[DictConfig, Callable[[], list[Loaded]]]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from kvlaunch.config.searchpath import own_folder

    store = ConfigStore.instance()
    store.store(name=_SCHEMA, node=LaunchConfig, provider="kvlaunch")
    chosen = [_choice(group, name) for group, name in request.chosen.items()]
    if request.given_model is not None:
        store.store(group="model", name=_GIVEN_MODEL, node=dict(request.given_model), provider="kvlaunch")
        chosen.append(_choice("model", _GIVEN_MODEL))
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with own_folder(groups.own), initialize_config_dir(str(groups.shipped), version_base="1.3"):
                cfg = hydra_compose(_ROOT, overrides=chosen)
                loader = GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = outer
    if OmegaConf.get_type(cfg) is not LaunchConfig:
        raise _no_schema(groups)
    return cfg, lambda: _loaded_files(loader, chosen)


def _no_schema(groups: Groups) -> ConfigError:
    return ConfigError(
        f"{groups.file(_ROOT)} replaces kvlaunch's own config.yaml, and does not start from its defaults.",
        hint="Put the values into DIR/preset/NAME.yaml and choose it with preset=NAME; or copy "
        f"{groups.shipped / 'config.yaml'} and go on from there.",
    )


def _choice(group: str, name: str) -> str:
    return f"{f'{group}@_global_' if group == keys.PRESET else group}={_quoted(name)}"


def _quoted(text: str) -> str:
    """`text` as a quoted value of Hydra's override grammar, which doubles backslashes only before a quote."""
    out, run = [], 0
    for char in text:
        if char == "'":
            out.append("\\" * (run + 1))
        out.append(char)
        run = run + 1 if char == "\\" else 0
    return "'" + "".join(out) + "\\" * run + "'"


def _loaded_files(loader: ConfigLoader, chosen: list[str]) -> list[Loaded]:
    """What was merged, first to last. As dear as the composition itself, so done only where somebody asks."""
    from hydra.types import RunMode

    found = loader.compute_defaults_list(_ROOT, overrides=chosen, run_mode=RunMode.RUN)
    return [
        Loaded(item.config_path, item.package or "")
        for item in found.defaults
        if item.config_path and not item.config_path.startswith("hydra/")
    ]


def _set_values(cfg: DictConfig, request: Request) -> None:
    from omegaconf import OmegaConf, open_dict

    if request.served_as is not None:
        OmegaConf.update(cfg, "model.name", request.served_as)
    for key, value, override in request.values:
        try:
            _set(cfg, key.split("."), value)
        except _BlockedError as e:
            raise ConfigError(
                f"{override.text}: {e.args[0]} is already set to a plain value, so nothing can go below it."
            ) from None
    for override in request.deletions:
        parent, _, leaf = override.key.rpartition(".")
        node = OmegaConf.select(cfg, parent)
        if not OmegaConf.is_dict(node) or leaf not in node:
            raise ConfigError(f"{override.text}: {override.key} is not set, so it cannot be taken out.")
        with open_dict(node):
            del node[leaf]


class _BlockedError(Exception):
    pass


def _set(cfg: DictConfig, path: list[str], value: Any) -> None:
    """Set a value; dictionaries on the way are made, and a mapping is merged into one that is there."""
    from omegaconf import DictConfig, open_dict

    node = cfg
    for depth, name in enumerate(path[:-1], start=1):
        with open_dict(node):
            if name not in node or node[name] is None:
                node[name] = {}
        node = node[name]
        if not isinstance(node, DictConfig):
            raise _BlockedError(".".join(path[:depth]))
    with open_dict(node):
        old = node[path[-1]] if path[-1] in node and not node._is_missing() else None
        if isinstance(old, DictConfig) and isinstance(value, dict):
            old.merge_with(value)
        else:
            node[path[-1]] = value


def _require_model(cfg: DictConfig, groups: Groups) -> None:
    from omegaconf import OmegaConf

    if not OmegaConf.is_missing(cfg.model, "name"):
        return
    if not cfg.model.path:
        raise overrides.no_model(groups.choices("model"))
    cfg.model.name = cfg.model.path


def _typed(cfg: DictConfig) -> LaunchConfig:
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(cfg)
    if not isinstance(config, LaunchConfig):
        raise TypeError(f"composed a {type(config).__name__}, not a LaunchConfig")
    for key in keys.all_keys().values():
        if key.kind == "bytes":
            parent: Any = config
            for name in key.path.split(".")[:-1]:
                parent = getattr(parent, name)
            value = getattr(parent, key.leaf)
            if value is not None:
                setattr(parent, key.leaf, parse_bytes(value, what=key.path))
    return config


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return getattr(value, "value", value)


@contextmanager
def _hydra_errors(groups: Groups) -> Iterator[None]:
    """What Hydra and OmegaConf refuse, told as an error of the config.

    Overrides have been checked by now, so what is wrong lies in a file of the user's, or in an interpolation.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (InterpolationKeyError, InterpolationResolutionError) as e:
        key = getattr(e, "full_key", None)
        raise ConfigError(
            f"{key}: {_first_line(e)}.",
            hint="${...} refers to another key, or ${oc.env:NAME} to a variable; for a literal write \\${...}",
        ) from e
    except (YAMLError, UnicodeDecodeError) as e:
        check_own_files(groups)
        raise ConfigError(f"A file of the config is not YAML: {e}") from e
    except (HydraException, OmegaConfBaseException) as e:
        check_own_files(groups)
        if groups.own and (groups.own / f"{_ROOT}.yaml").is_file():
            raise _no_schema(groups) from e
        key = getattr(e, "full_key", None) or getattr(e.__cause__, "full_key", None)
        raise ConfigError(f"The config does not compose{f' at {key}' if key else ''}: {_summary(e)}") from e


def _first_line(e: BaseException) -> str:
    return str(e).strip().splitlines()[0].rstrip(".") if str(e).strip() else type(e).__name__


def _summary(e: BaseException) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type=")))


def check_own_files(groups: Groups) -> None:
    """Find what is wrong in the files of --config-dir, by the rules that overrides follow.

    Raises:
        ConfigError: naming the file, the key and what it wants.
    """
    if groups.own is None:
        return
    import yaml

    for group, choices in groups.all_choices().items():
        for choice in choices.values():
            if not choice.own:
                continue
            try:
                content = yaml.load(choice.path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
            except (yaml.YAMLError, UnicodeDecodeError) as e:
                raise ConfigError(f"{choice.path} is not YAML: {' '.join(str(e).split())}") from None
            if content is None:
                continue
            prefix = "" if group == keys.PRESET else f"{group}."
            if not isinstance(content, dict):
                raise ConfigError(f"{choice.path} holds no keys.", hint="Write KEY: VALUE, one a line.")
            try:
                _check_node(content, prefix)
            except ConfigError as e:
                raise ConfigError(f"{choice.path}: {e.message}", hint=e.hint) from None


def _check_node(content: dict[str, Any], prefix: str) -> None:
    for name, value in content.items():
        if prefix in ("", *(f"{g}." for g in keys.GROUPS)) and name == "defaults":
            continue
        path = f"{prefix}{name}"
        key = keys.find(path)
        if key is None:
            raise overrides.unknown_key(overrides.Override(path, path, str(value)))
        if key.kind in ("args", "env"):
            continue
        if isinstance(value, dict):
            if key.kind != "node":
                raise ConfigError(f"{path} wants {key.wants}, got a mapping.")
            _check_node(value, f"{path}.")
        elif key.kind == "node":
            raise ConfigError(f"{path} has keys of its own, so {value!r} cannot be its value.")
        elif not isinstance(value, str):
            raise ConfigError(f"{path} wants {key.wants}, got a list.")
        elif "${" not in value:
            values.coerce(key, path, value)
