"""Write the table of what is supported into docs/engines.md, from the tests that prove it.

    python tools/support_docs.py            rewrite the part between the markers
    python tools/support_docs.py --check    exit with 1 where it is not what the tests say

A test with real engines that proves a row carries `@pytest.mark.supports(feature)`, and the mark of its engine. The
tests are only collected here; that they pass is what a run of all tests shows. Needs kvlaunch's environment.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
from doc_part import renew, replaced

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engines.md"
BEGIN = "<!-- support: written by `make docs` from the marks of the tests in tests/engines -->"
END = "<!-- end of support -->"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
REFUSED = "no: refused by name"

Rows = dict[str, dict[str, str]]
"""Feature -> engine -> what the table says."""


class Collector:
    """A pytest plugin that looks at the marks of what was collected."""

    def __init__(self) -> None:
        self.rows: Rows = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            engines = [engine for engine in ENGINES if item.get_closest_marker(engine)]
            for mark in item.iter_markers("supports"):
                if len(engines) != 1:
                    raise pytest.UsageError(f"{item.nodeid} supports something and has not the mark of one engine")
                said = REFUSED if mark.kwargs.get("refused") else mark.kwargs.get("how", "yes")
                row = self.rows.setdefault(mark.args[0], {})
                if row.setdefault(engines[0], said) != said:
                    raise pytest.UsageError(f"{item.nodeid}: {mark.args[0]} is {row[engines[0]]!r} by another test")


def collect() -> Rows:
    collector = Collector()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/engines"], [collector])
    if status != pytest.ExitCode.OK:
        raise SystemExit(said.getvalue())
    return collector.rows


def table(rows: Rows) -> str:
    lines = [f"| with `kv=elastic` | {' | '.join(ENGINES.values())} |", f"|---|{'---|' * len(ENGINES)}"]
    for feature in sorted(rows, key=str.lower):
        cells = (rows[feature].get(engine, "not tried") for engine in ENGINES)
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rendered(page: str) -> str:
    return replaced(page, BEGIN, END, table(collect()))


def main() -> int:
    return renew(PAGE, rendered, check=sys.argv[1:] == ["--check"], source="the marks of the tests in tests/engines")


if __name__ == "__main__":
    sys.exit(main())
