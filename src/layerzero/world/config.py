"""Reads policy from its sources: the policy file, the environment, and calls.

A source is applied whole or not at all: its errors are collected, each with its place and the
nearest valid word, and raised together as one `ConfigError`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..files import paths
from ..files.paths import cache_dir as cache_dir
from ..files.reading import read_text
from ..selection.conditions import parse_when
from ..selection.policy import ACTIONS, RENAMED, SETTINGS, Layer, PolicyRule, validate_setting
from ..spec.errors import ConfigError, PolicyValidationError
from ..spec.names import suggest
from ..spec.reason import shown

PREFIX = "LAYERZERO_"
MAX_ERRORS = 10
VERSION = 1
_MAX_DEPTH = 16                                # of nesting in a policy file; the schema needs five
# bytes of a policy file, some 2,000 rules: YAML is read at 100 KB/s
_MAX_SIZE = 128 << 10
_MAX_SCALAR = 1000                             # characters of one value
_MAX_MESSAGE = 600                             # characters of one error

VARIABLES: Mapping[str, str] = {
    **{PREFIX + name.upper(): setting.doc for name, setting in SETTINGS.items()},
    **{PREFIX + name.upper(): f"deprecated; use {PREFIX + new.upper()}"
       for name, new in RENAMED.items()},
    "LAYERZERO_POLICY": "path of the policy file",
    "LAYERZERO_CACHE_DIR":
        "folder for measurements, certificates and tables; default ~/.cache/layerzero",
    "LAYERZERO_AUTO": "1: models are patched as they are loaded (lz.auto, at `import layerzero`)",
    "LAYERZERO_LOCK": "op=kernel pairs, separated by ';'",
    "LAYERZERO_ALLOW": "kernel patterns, separated by ','",
    "LAYERZERO_RECORD": "folder where each process writes the calls it makes; lz record sets it",
    "LAYERZERO_SEAL_KEY":
        "the key that certificates and compiled code are sealed with, where machines share them; "
                          "default: this user's own",
    "LAYERZERO_DENY": "kernel patterns, separated by ','",
    "LAYERZERO_DISABLE_ISA":
        "instruction sets that our own CPU kernels leave unused, separated by ',': amx, sve",
}

OpFacts = Mapping[str, Collection[str]]        # op name -> the facts it has


def _raise_all(errors: list[str], end: str) -> None:
    if errors:
        more = [f"... and {len(errors) - MAX_ERRORS} more"] if len(errors) > MAX_ERRORS else []
        lines = [shown(error, str, _MAX_MESSAGE) for error in errors[:MAX_ERRORS]]
        raise PolicyValidationError("\n".join([*lines, *more, end]))


# the environment

def environment_layer(environ: Mapping[str, str] | None = None,
                      ops: OpFacts | None = None) -> Layer | None:
    """Returns the layer of LAYERZERO_* variables, None if none is set or all are empty."""
    environ = os.environ if environ is None else environ
    errors: list[str] = []
    settings: dict[str, Any] = {}
    rules: list[PolicyRule] = []
    for variable in sorted(v for v in environ if v.startswith(PREFIX)):
        text, name = environ[variable].strip(), variable[len(PREFIX):].lower()
        try:
            if variable not in VARIABLES:
                raise PolicyValidationError(f"unknown variable{suggest(variable, VARIABLES)}")
            if text and name in (*SETTINGS, *RENAMED):
                settings[name] = validate_setting(name, text)
            elif text and name in ACTIONS:
                rules += _variable_rules(name, text, variable, ops)
        except ConfigError as e:
            errors.append(f"{variable}={environ[variable]}: {e}")
    _raise_all(errors, "correct or unset it; nothing of the environment was applied")
    return Layer("environment", settings, tuple(rules)) if settings or rules else None


def _variable_rules(action: str, text: str, origin: str,
                    ops: OpFacts | None) -> Iterator[PolicyRule]:
    parts = ([part for part in text.split(";") if part.strip()] if action == "lock"
             else [f"*={text}"])
    for op, sign, kernels in (part.partition("=") for part in parts):
        if not sign:
            raise PolicyValidationError(
                f"wants op=kernel pairs separated by ';', got {op.strip()!r}; "
                "write it like attention=torch.sdpa_math;rms_norm=torch.rms_norm")
        rule = PolicyRule.of(action, _split(kernels), _split(op), origin=origin)
        if ops is not None:
            rule.check(ops)
        yield rule


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def policy_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Returns the path in LAYERZERO_POLICY."""
    text = (os.environ if environ is None else environ).get("LAYERZERO_POLICY", "").strip()
    return paths.expand_path(text, "LAYERZERO_POLICY") if text else None


# layers made by calls

def programmatic_layer(old: Layer | None, settings: Mapping[str, Any] | None = None,
                       rules: Iterable[PolicyRule] = (), *, name: str = "programmatic",
                       expires_at: float | None = None) -> Layer:
    """Returns `old` with new settings and rules: new ones win, and replace rules with the same
    subject.

    Two locks have the same subject when their ops and conditions are equal, other rules when their
    kernels are too. `expires_at` ends only what is added now: `old` holds again after it, and an
    earlier deadline of `old` still applies. `name` may be "context" or "call" as well.
    """
    new_settings, new_rules = dict(settings or {}), tuple(rules)
    if old is None:
        return Layer(name, new_settings, new_rules, expires_at)
    # A rule with a deadline only hides the old one for a time; two boosts would multiply.
    replaced = {_subject(rule) for rule in new_rules if rule.expires_at is None
                or rule.action == "boost"}
    merged = Layer(name, {**old.settings, **new_settings},
                   (*new_rules, *(r for r in old.rules if _subject(r) not in replaced)))
    if old.expires_at is not None and (expires_at is None or old.expires_at < expires_at):
        after = programmatic_layer(old.before, new_settings, new_rules, name=name,
                                   expires_at=expires_at)
        return replace(merged, expires_at=old.expires_at, before=after)
    return replace(merged, expires_at=expires_at, before=old if expires_at is not None else None)


def _subject(rule: PolicyRule) -> tuple[Any, ...]:
    return rule.action, () if rule.action == "lock" else rule.kernels, rule.ops, rule.when


# the policy file

@dataclass(frozen=True)
class FileStamp:
    """Identifies the state of a file without reading it."""

    mtime_ns: int
    size: int
    inode: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileStamp | None:
        """Returns None if there is no such file."""
        try:
            stat = os.stat(path)
        except (OSError, ValueError):
            return None
        return cls(stat.st_mtime_ns, stat.st_size, stat.st_ino)


def reload_if_changed(path: str | os.PathLike[str], stamp: FileStamp | None,
                      old_layer: Layer | None, ops: OpFacts | None = None) -> tuple[
                          FileStamp | None, Layer | None, ConfigError | None]:
    """Returns the file's stamp and layer; a broken file keeps the old layer, with one error."""
    new_stamp = FileStamp.of(path)             # before reading: a write in between shows next time
    if new_stamp == stamp:
        return stamp, old_layer, None
    try:
        return new_stamp, load_policy_file(path, ops), None
    except ConfigError as e:
        return new_stamp, old_layer, e


def load_policy_file(path: str | os.PathLike[str], ops: OpFacts | None = None) -> Layer:
    """Returns the layer in a YAML policy file; with `ops`, ops and facts are checked too."""
    try:
        text = read_text(path, "a policy file", size=_MAX_SIZE, error=ConfigError)
    except ConfigError as e:
        raise PolicyValidationError(f"{e}; correct it, or name another file (LAYERZERO_POLICY, "
                                    "lz.load_config)") from e
    reader = _Reader(Path(path), text, ops)
    layer = reader.layer()
    ordered = [f"{path}:{line}: {message}"
               for line, message in sorted(reader.errors, key=itemgetter(0))]
    _raise_all(ordered, "nothing of this file was applied")
    return layer


class _NodeError(PolicyValidationError):
    """An error at one node of the file."""

    def __init__(self, node: Any, message: str) -> None:
        super().__init__(message)
        self.node = node


class _Reader:
    """Walks the nodes of a document; records errors with their line, and reads on."""

    def __init__(self, path: Path, text: str, ops: OpFacts | None) -> None:
        try:
            import yaml  # type: ignore[import-untyped]
        except ImportError as e:
            raise PolicyValidationError(
                f"{path}: reading a policy file needs PyYAML; install pyyaml") from e
        self.yaml, self.path, self.text, self.ops = yaml, path, text, ops
        self.errors: list[tuple[int, str]] = []

    def layer(self) -> Layer:
        settings: dict[str, Any] = {}
        rules: list[PolicyRule] = []
        try:
            self.loader = plain_loader(self.yaml, self.text)
            root = self.loader.get_single_node()
        except self.yaml.YAMLError as e:
            # an error of characters has a position instead
            mark = getattr(e, "problem_mark", None)
            line = mark.line if mark else self.text.count("\n", 0, getattr(e, "position", 0))
            what = getattr(e, "problem", None) or str(e).splitlines()[0]
            self.errors.append((line + 1, f"not valid YAML: {what}"))
            return Layer("file")
        fields: dict[str, Any] = {}
        with self.at(root):
            fields = self.fields(root, "a policy file", ("version", "settings", "rules"))
        version = fields.get("version")
        if version is not None and version.value != str(VERSION):
            self.note(version, f"version must be {VERSION}, got {self.shown(version)}; "
                               "this file is for another version of the library")
        with self.at(root):
            for name, node in self.fields(fields.get("settings"), "settings").items():
                with self.at(node):
                    settings[name] = validate_setting(name, self.value(node))
        with self.at(root):
            for node in self.items(fields.get("rules"), "rules"):
                with self.at(node):
                    rules += self.rules(node)
        return Layer("file") if self.errors else Layer("file", settings, tuple(rules))

    def rules(self, node: Any) -> list[PolicyRule]:
        """Returns the rule of one list item; several if a boost names several factors."""
        known_errors = len(self.errors)
        fields = self.fields(node, "a rule", (*ACTIONS, "factor", "op", "when", "for", "until"))
        actions = [a for a in ACTIONS if a in fields]
        if not actions and len(self.errors) > known_errors:
            return []                          # a misspelt action was reported already
        if len(actions) != 1:
            got = " and ".join(actions) or "none"
            raise PolicyValidationError(
                f"a rule wants exactly one of {', '.join(ACTIONS)}, got {got}")
        action, target = actions[0], fields[actions[0]]
        factors: list[tuple[tuple[str, ...], Any]]
        if action == "boost" and isinstance(target, self.yaml.MappingNode):
            if "factor" in fields:
                raise _NodeError(fields["factor"], "boost has its factors already; drop this one")
            factors = [((pattern,), self.value(factor))
                       for pattern, factor in self.fields(target, "boost").items()]
        elif action == "boost" and "factor" not in fields:
            raise _NodeError(target,
                             "boost wants a factor; write boost: {\"torch.*\": 1.5}, or add "
                             "factor: 1.5")
        else:
            factors = [(self.words(target, action), self.value(fields["factor"])
                        if "factor" in fields else 1.0)]
        ops = self.words(fields["op"], "op") if "op" in fields else ("*",)
        when = self.conditions(fields["when"]) if "when" in fields else ()
        expires_at, origin = self.deadline(fields), f"{self.path.name}:{self.line(node)}"
        rules = [PolicyRule(action, kernels, ops, when, factor, origin, expires_at)
                 for kernels, factor in factors]
        if self.ops is not None:
            for rule in rules:
                rule.check(self.ops)
        return rules

    def conditions(self, node: Any) -> tuple[Any, ...]:
        tests: list[Any] = []
        fields = self.fields(node, "when")
        if not fields:
            raise _NodeError(node, "when is empty; name at least one fact, or leave it out")
        for fact, value in fields.items():
            with self.at(value):
                tests += parse_when({fact: self.value(value)})
        return tuple(sorted(tests, key=lambda test: str(test.fact)))

    def deadline(self, fields: Mapping[str, Any]) -> float | None:
        if "for" in fields and "until" in fields:
            raise _NodeError(fields["until"], "a rule takes 'for' or 'until', not both")
        if "for" in fields:
            seconds = self.value(fields["for"])
            if (isinstance(seconds, bool) or not isinstance(seconds, (int, float))
                or not 0 < seconds < 1e12):
                raise _NodeError(fields["for"],
                                 f"for must be a number of seconds > 0, got {seconds!r}")
            return time.monotonic() + seconds
        if "until" in fields:
            end = _parse_time(self.value(fields["until"]))
            if end is None:
                raise _NodeError(fields["until"],
                                 f"until must be a time like 2030-12-31T18:00:00Z, "
                                              f"got {self.shown(fields['until'])}")
            return time.monotonic() + (end - datetime.now(timezone.utc)).total_seconds()
        return None

    # nodes

    @contextmanager
    def at(self, node: Any) -> Iterator[None]:
        """Records an error inside the block, at its own node or else at this one."""
        try:
            yield
        except _NodeError as e:
            self.note(e.node, str(e))
        except ConfigError as e:
            self.note(node, str(e))

    def note(self, node: Any, message: str) -> None:
        self.errors.append((self.line(node), message))

    def line(self, node: Any) -> int:
        return int(node.start_mark.line) + 1

    def shown(self, node: Any) -> str:
        kinds = {"MappingNode": "a mapping", "SequenceNode": "a list"}
        return kinds.get(type(node).__name__) or repr(node.value)

    def is_empty(self, node: Any) -> bool:
        return node is None or (isinstance(node, self.yaml.ScalarNode) and self.value(node) is None)

    def items(self, node: Any, what: str) -> list[Any]:
        if self.is_empty(node):
            return []
        if not isinstance(node, self.yaml.SequenceNode):
            raise _NodeError(node,
                             f"{what} must be a list, got {self.shown(node)}; begin each item with "
                             "'- '")
        return list(node.value)

    def fields(self, node: Any, what: str, known: tuple[str, ...] = ()) -> dict[str, Any]:
        """Returns a mapping's value nodes by key; keys must be in `known` unless that is empty."""
        if self.is_empty(node):
            return {}
        if not isinstance(node, self.yaml.MappingNode):
            raise _NodeError(node,
                             f"{what} must be a mapping of keys to values, got {self.shown(node)}")
        nodes: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, self.yaml.ScalarNode):
                self.note(key, f"a key of {what} must be text, got {self.shown(key)}")
            elif known and key.value not in known:
                self.note(key, f"unknown key {key.value!r} in {what}{suggest(key.value, known)}")
            elif key.value in nodes:
                self.note(key,
                          f"{key.value!r} is given twice in {what}, first on line "
                          f"{lines[key.value]}")
            else:
                nodes[key.value], lines[key.value] = value, self.line(key)
        return nodes

    def value(self, node: Any) -> Any:
        """Returns a scalar, or a list of scalars."""
        if isinstance(node, self.yaml.SequenceNode):
            return [self.scalar(item) for item in node.value]
        return self.scalar(node)

    def scalar(self, node: Any) -> Any:
        if not isinstance(node, self.yaml.ScalarNode):
            raise _NodeError(node, f"wants a plain value, got {self.shown(node)}")
        try:
            value = self.loader.construct_object(node)
            if isinstance(value, int) and value.bit_length() > 64:   # nothing here is so large
                raise OverflowError
            return value
        except (self.yaml.YAMLError, ValueError, OverflowError):
            raise _NodeError(node,
                             f"cannot read the value {node.value!r}; put it in quotes if it is "
                             "text") from None

    def words(self, node: Any, what: str) -> tuple[str, ...]:
        value = self.value(node)
        words = value if isinstance(value, list) else [value]
        if not words or not all(isinstance(word, str) for word in words):
            raise _NodeError(node, f"{what} wants a pattern or a list of patterns, got {value!r}")
        return tuple(words)


def _parse_time(value: Any) -> datetime | None:
    """Returns a time with its zone: UTC if none is given, as in YAML; None if it is no time."""
    try:
        when = (datetime.fromisoformat(value.replace("Z", "+00:00")) if isinstance(value, str)
                else value)
    except ValueError:
        return None
    if isinstance(when, date) and not isinstance(when, datetime):
        when = datetime(when.year, when.month, when.day)
    if not isinstance(when, datetime):
        return None
    return when if when.tzinfo else when.replace(tzinfo=timezone.utc)


def plain_loader(yaml: Any, text: str) -> Any:
    """Returns PyYAML's safe loader without what only a hostile file uses: aliases, tags, depth."""

    class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            refused = ("an alias (*name) is not supported" if isinstance(event, yaml.AliasEvent)
                       else "a tag (!name) is not supported" if event.tag is not None
                       else "nested too deeply" if self.depth >= _MAX_DEPTH
                       else f"a value of more than {_MAX_SCALAR} characters"
                       if isinstance(event, yaml.ScalarEvent) and len(event.value) > _MAX_SCALAR
                       else "")
            if refused:
                raise yaml.composer.ComposerError(None, None, refused, event.start_mark)
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return PlainLoader(text)
