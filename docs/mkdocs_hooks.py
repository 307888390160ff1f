"""Hooks of mkdocs: README.md is the first page, and what pages link to outside docs/ comes along.

A page of the repository links as a reader of the repository needs it (`docs/guide.md`,
`../SECURITY.md`). On the site docs/ is the top, so targets are written anew; files that are not in
docs/ keep their path below it. mkdocs checks every link of the result.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def place(path: str) -> str:
    """Where a file of the repository is on the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def origin(page: str) -> str:
    """Where a page of the site is in the repository."""
    if page == "index.md":
        return "README.md"
    return f"docs/{page}" if (ROOT / "docs" / page).exists() else page


def targets(path: str, text: str) -> set[str]:
    """The files of the repository that a page of it links to."""
    prose = FENCE.sub("", text)
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
            for link in LINK.findall(prose)}


def on_files(files: Files, config: Any) -> Files:
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text("utf-8")
        if not path.startswith("docs/"):
            files.append(File.generated(config, place(path), content=text))
        if path.endswith(".md"):
            more = {t for t in targets(path, text) if (ROOT / t).is_file()
                    and not t.startswith("docs/")} - seen
            waiting += more
            seen |= more
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    path = origin(here)

    def site_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        return posixpath.relpath(place(target), posixpath.dirname(here) or ".")

    # A page whose first line is no heading would be named after its file.
    parts = FENCE.split(re.sub(r"\A<!--.*?-->\s*", "", markdown))
    for number in range(0, len(parts), 2):               # what is between the blocks of code
        prose = LINK.sub(site_link, parts[number])
        # A bar in the code of a table's cell: GitHub wants it escaped, Python-Markdown does not.
        parts[number] = re.sub(r"^\|.*$", lambda row: re.sub(
            r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row[0]), prose,
            flags=re.MULTILINE)
    return "".join(parts)
