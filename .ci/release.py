"""Before a release: do tag, version, changelog, citation and addresses say the same?

    python .ci/release.py --tag v0.1.0 --repository OWNER/NAME --notes notes.md

Every disagreement is printed. The notes are the section of the version in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def found(pattern: str, file: str) -> str:
    match = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else ""


def version() -> str:
    """Read it as setuptools does, without importing torch."""
    return found(r'^__version__ = "([^"]+)"', "src/layerzero/__init__.py")


def notes(wanted: str) -> tuple[str, str]:
    """Return the date ("unreleased" until it has one) and the text of a version's changelog."""
    head = rf"^## \[{re.escape(wanted)}\] - "
    return (found(head + r"([^\n]+)", "CHANGELOG.md"),
            found(head + r"[^\n]+\n(.*?)(?=^## |\Z)", "CHANGELOG.md"))


def disagreements(tag: str, repository: str) -> list[str]:
    here, problems = version(), []
    if tag != f"v{here}":
        problems.append(f"the tag is {tag}, the version in src/layerzero/__init__.py is {here}: "
                        f"tag v{here} or change the version")
    cited = found(r"^version: (\S+)", "CITATION.cff")
    if cited != here:
        problems.append(f"CITATION.cff cites {cited or 'no version'}, wanted {here}")
    date, text = notes(here)
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date) or not text:
        problems.append(f"CHANGELOG.md wants a section '## [{here}] - YYYY-MM-DD' with text, "
                        f"has the date {date or 'of no such section'!r}")
    home = f"https://github.com/{repository}"
    for pattern, file in ((r'^Repository = "([^"]+)"', "pyproject.toml"),
                          (r"^repository-code: (\S+)", "CITATION.cff")):
        if found(pattern, file) != home:
            problems.append(f"{file} sends readers to {found(pattern, file)}, "
                            f"the release is made in {home}: correct its addresses")
    return problems


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", required=True)
    parser.add_argument("--repository", required=True, help="OWNER/NAME on GitHub")
    parser.add_argument("--notes", type=Path, help="write the section of the changelog here")
    asked = parser.parse_args(words)
    problems = disagreements(asked.tag, asked.repository)
    print("\n".join(problems) or f"{asked.tag}: all agree")
    if asked.notes and not problems:
        asked.notes.write_text(notes(version())[1] + "\n", encoding="utf-8")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
