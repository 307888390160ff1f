"""Waivers: what the gate may let pass although it is beyond its threshold, why, and until when.

    version: 1
    waivers:
      - what: performance/cpu-arm/rms_norm decode
        # stage/check/subject as the gate prints it; * and ? match
        reason: torch 2.14 made its own norm faster; ours follows in the next release
        expires: 2026-12-31
        target: cpu-arm                               # optional: only there

Only thresholds can be waived, never a wrong answer. A waiver ends by itself: after its day it is a
finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..files.reading import read_text
from ..spec.codec import Record
from ..spec.errors import ConfigError
from ..spec.names import suggest
from ..verify.cases.declarations import Checked, Finding
from ..world.config import plain_loader

VERSION = 1
WAIVABLE = ("performance/", "soak/trend/")     # what a pattern must begin with
REQUIRED, OPTIONAL = ("what", "reason", "expires"), ("target",)
MAX_BYTES = 64 << 10                           # reading YAML takes a second for ten times that
MIN_REASON = 10                                # letters: "todo" is none


@dataclass(frozen=True)
class Waiver(Record, json="what reason expires target"):
    what: str
    reason: str
    expires: date                              # the last day it holds
    target: str = ""
    origin: str = ""

    def covers(self, name: str, target: str) -> bool:
        return fnmatchcase(name, self.what) and self.target in ("", target)


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Read every waiver of a file; ConfigError with everything that is wrong with it."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as e:
        raise ConfigError(f"{path}: reading waivers needs PyYAML; install pyyaml") from e
    text = read_text(path, "a file of waivers", size=MAX_BYTES, error=ConfigError)
    try:
        data = plain_loader(yaml, text).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError) as e:
        raise ConfigError(f"{path}: not a file of waivers: {e}") from e
    if (not isinstance(data, Mapping) or set(data) != {"version", "waivers"}
        or data["version"] != VERSION):
        got = ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise ConfigError(f"{path}: wanted `version: {VERSION}` and `waivers:`, got {got}")
    if not isinstance(data["waivers"], list):
        raise ConfigError(
            f"{path}: waivers must be a list, got {type(data['waivers']).__name__}; [] for none")
    problems: list[str] = []
    waivers = [_waiver(row, f"{path}: waivers[{i}]", problems)
               for i, row in enumerate(data["waivers"])]
    if problems:
        raise ConfigError("\n".join([*problems[:10], "correct the file; nothing was waived"]))
    return tuple(w for w in waivers if w is not None)


def _waiver(row: Any, at: str, problems: list[str]) -> Waiver | None:
    before = len(problems)
    if not isinstance(row, Mapping):
        problems.append(f"{at}: wanted {', '.join(REQUIRED)}, got {row!r:.100}")
        return None
    known = (*REQUIRED, *OPTIONAL)
    problems += [f"{at}: unknown key {key!r}{suggest(str(key), known)}" for key in row
                 if key not in known]
    problems += [f"{at}: {key} is missing" for key in REQUIRED if key not in row]
    for key in ("what", "reason", "target"):
        if key in row and (not isinstance(row[key], str) or not row[key].strip()):
            problems.append(f"{at}: {key} must be a text, got {row[key]!r:.100}")
    expires = row.get("expires")
    if "expires" in row and (not isinstance(expires, date) or isinstance(expires, datetime)):
        problems.append(f"{at}: expires must be a day such as 2026-12-31, got {expires!r:.100}")
    if len(problems) > before:
        return None
    if not row["what"].startswith(WAIVABLE):
        problems.append(
            f"{at}: only {' and '.join(w + '...' for w in WAIVABLE)} can be waived, got "
            f"{row['what']!r}; a wrong answer is corrected, not waived")
    if len(row["reason"].strip()) < MIN_REASON:
        problems.append(
            f"{at}: reason must say why, in {MIN_REASON} letters or more, got {row['reason']!r}")
    return Waiver(row["what"], row["reason"].strip(), row["expires"], row.get("target", ""), at)


@dataclass(frozen=True)
class Waived:
    """The findings that waivers cover, and the waivers that are expired or unused."""

    by: Mapping[str, Waiver]                   # name of a finding -> the waiver that covers it
    check: Checked                             # expired ones are its findings
    unused: tuple[Waiver, ...]                 # that could have been used


def name_of(stage: str, finding: Finding) -> str:
    return f"{stage}/{finding.check}/{finding.subject}"


def apply(waivers: Iterable[Waiver], names: Iterable[str], stages: Iterable[str], target: str,
          today: date) -> Waived:
    """Applies waivers to findings; `names` are those of all findings of the `stages` that ran. A
    waiver of a stage or target that did not run says nothing."""
    every, used, by = list(waivers), set(), {}             # type: list[Waiver], set[Waiver], dict[str, Waiver]
    for name in names:
        if not name.startswith(WAIVABLE):
            continue
        for waiver in every:
            if waiver.covers(name, target):
                used.add(waiver)
                if waiver.expires >= today:
                    by.setdefault(name, waiver)
    concerned = [w for w in every if w.what.split("/")[0] in set(stages)
                 and w.target in ("", target)]
    expired = tuple(Finding("waivers", w.what, f"expired on {w.expires}: {w.reason}",
                            "correct what it waived, or give it a new day and say why")
                    for w in concerned
                    if w.expires < today)
    unused = tuple(w for w in concerned if w not in used and w.expires >= today)
    note = "; ".join(f"unused: {w.what} (until {w.expires}); take it out" for w in unused)
    return Waived(by, Checked("waivers", "every waiver is in force and is needed", len(every),
                              expired, note), unused)
