"""Names in docstrings, comments and documentation lead somewhere: modules, what is in them, notes and files."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("src", "benchmarks", "tests", "examples") for path in (ROOT / folder).rglob("*.py")
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])

DOTTED = re.compile(r"(?<!`)`(ebbtide(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`")
NOTE = re.compile(r"NOTE\s+\[([^\]]+)\]")
NOTE_TITLE = re.compile(r"^\s*(?:# )?NOTE \[([^\]]+)\]\s*$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def _lines(path: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """What ``pattern`` finds in a file, and where."""
    text = path.read_text()
    for found in pattern.finditer(text):
        yield found[1], f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}"


@cache
def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one; instances' attributes count if the class names them."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for k, part in enumerate(parts[end:], start=end):
            if not hasattr(found, part):
                return k == len(parts) - 1 and part in getattr(found, "__annotations__", {})
            found = getattr(found, part)
        return True
    return False


def _anchors(page: Path) -> set[str]:
    """What links to a page's headings may end in, as GitHub makes it."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(page.read_text())}


def test_dotted_names_exist() -> None:
    found = (pair for path in [*SOURCES, *PAGES] for pair in _lines(path, DOTTED))
    assert [f"{where}: {name}" for name, where in found if not _exists(name)] == []


def test_notes_exist() -> None:
    sources = [path for path in SOURCES if path != Path(__file__)]
    titles = {title for path in sources for title in NOTE_TITLE.findall(path.read_text())}
    found = (pair for path in sources for pair in _lines(path, NOTE))
    assert [f"{where}: {title}" for title, where in found if re.sub(r"\s+(?:# )?", " ", title) not in titles] == []


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page in PAGES:
        for link, where in _lines(page, LINK):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            if link.startswith(("http://", "https://")):
                continue
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append(f"{where}: {link}")
    assert broken == []
