"""Where policy comes from: the file, the environment, calls. Real files, a given environment."""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import yaml
from helpers import run_python
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from layerzero.selection.policy import ACTIONS, SETTINGS, Layer, Policy, PolicyRule
from layerzero.spec.errors import ConfigError
from layerzero.world.config import (
    VARIABLES,
    FileStamp,
    cache_dir,
    environment_layer,
    load_policy_file,
    policy_path,
    programmatic_layer,
    reload_if_changed,
)

OPS = {"attention": {"head_dim", "seq_k", "dtype", "is_causal"}, "rms_norm": {"hidden", "dtype"}}
steady = settings(deadline=None)
reuse_tmp_path = settings(deadline=None,
                          suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def load(tmp_path):
    def loaded(text, ops=None):
        path = tmp_path / "policy.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return load_policy_file(path, ops)

    return loaded


def problems(error):
    """[(line, message)] of a file's error."""
    return [(int(m[1]), m[2]) for m in re.finditer(r"policy\.yaml:(\d+): (.*)", str(error.value))]


# the file

FULL = """\
version: 1
settings:
  strict_mode: true
  cache_ttl: null
  memory_headroom: 1_000_000
  log_level: info

rules:
  - lock: torch.sdpa_math
    op: attention
    when: {head_dim: "> 128", dtype: [float16, bfloat16]}
  - deny: ["flash_attn.*", flashinfer.single]
    op: [attention, rms_norm]
  - {allow: "torch.*", when: {is_causal: true, seq_k: 512..4096}}
  - boost: {"torch.*": 1.5, "triton.*": 2}
  - boost: "reference.*"
    factor: 0.5
"""


def test_a_whole_file(load):
    layer = load(FULL, OPS)
    assert layer.name == "file" and dict(layer.settings) == {
        "strict_mode": True, "cache_ttl": None, "memory_headroom": 1_000_000, "log_level": "info"}
    assert layer.rules == (
        PolicyRule.of("lock", "torch.sdpa_math", "attention",
                      {"head_dim": "> 128", "dtype": ["float16", "bfloat16"]},
                      origin="policy.yaml:9"),
        PolicyRule.of("deny", ["flash_attn.*", "flashinfer.single"], ["attention", "rms_norm"],
                      origin="policy.yaml:12"),
        PolicyRule.of("allow", "torch.*", when={"is_causal": True, "seq_k": "512..4096"},
                      origin="policy.yaml:14"),
        PolicyRule.of("boost", "torch.*", factor=1.5, origin="policy.yaml:15"),
        PolicyRule.of("boost", "triton.*", factor=2, origin="policy.yaml:15"),
        PolicyRule.of("boost", "reference.*", factor=0.5, origin="policy.yaml:16"))


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "{}", "version: 1",
                                  "settings:\nrules:\n", "settings: {}\nrules: []\n",
                                  "\ufeffversion: 1\n", "null"])
def test_an_empty_file_is_an_empty_layer(load, text):
    assert load(text) == Layer("file")


@pytest.mark.parametrize(("text", "line", "message"), [
    # the document
    ("just text", 1, "a policy file must be a mapping of keys to values, got 'just text'"),
    ("- a\n- b\n", 1, "must be a mapping of keys to values, got a list"),
    ("a: [1\nb: 2\n", 2, "not valid YAML"),
    ("a: 'x\n", 2, "not valid YAML"),
    ("version: 1\n\tsettings: {}\n", 2, "not valid YAML"),
    ("version: 1\n---\nversion: 1\n", 2, "not valid YAML"),
    ("version: 1\nrules: \x01\n", 2, "not valid YAML: unacceptable character"),
    ("a: &x 1\nb: *x\n", 2, "not valid YAML: an alias (*name) is not supported"),
    ("version: 1\nsettings: !!python/object/apply:os.getcwd []\n", 2,
     "a tag (!name) is not supported"),
    ("version: !!int 'one'\n", 1, "a tag (!name) is not supported"),
    ("rules: " + "[" * 400, 1, "nested too deeply"),
    ("rules: " + "{a: " * 400, 1, "nested too deeply"),
    # its keys
    ("version: 1\nsetings: {}\n", 2,
     "unknown key 'setings' in a policy file; did you mean 'settings'?"),
    ("version: 2\n", 1, "version must be 1, got '2'"),
    ("version: [1]\n", 1, "version must be 1, got a list"),
    ("version: 1\nversion: 1\n", 2, "'version' is given twice in a policy file, first on line 1"),
    ("? [a]\n: 1\n", 1, "a key of a policy file must be text, got a list"),
    # settings
    ("settings: [strict_mode]", 1, "settings must be a mapping"),
    ("settings:\n  strict_mod: true\n", 2,
     "unknown setting 'strict_mod'; did you mean 'strict_mode'?"),
    ("settings:\n  native: true\n  cache_size: lots\n", 3,
     "cache_size must be a whole number >= 1, got 'lots'"),
    ("settings:\n  cache_size: 5\n  cache_size: 6\n", 3,
     "'cache_size' is given twice in settings, first on line 2"),
    ("settings: {cache_size: {a: 1}}", 1, "wants a plain value, got a mapping"),
    ("settings: {cache_size: [[1]]}", 1, "wants a plain value, got a list"),
    ("settings: {cache_size: 0b_}", 1, "cannot read the value '0b_'"),
    ("settings: {perfdb: 2001-99-99}", 1, "cannot read the value '2001-99-99'"),
    ("settings: {perfdb: 2001-01-01}", 1, "perfdb must be text"),
    ("settings: {perfdb: =}", 1, "cannot read the value '='"),
    # rules
    ("rules: {deny: a.b}", 1, "rules must be a list, got a mapping; begin each item with '- '"),
    ("rules:\n  - deny\n", 2, "a rule must be a mapping"),
    ("rules:\n  -\n", 2, "a rule wants exactly one of lock, allow, deny, boost, got none"),
    ("rules:\n  - op: attention\n", 2, "exactly one of lock, allow, deny, boost, got none"),
    ("rules:\n  - {lock: a.b, deny: a.c}\n", 2, "got lock and deny"),
    ("rules:\n  - deni: a.b\n", 2, "unknown key 'deni' in a rule; did you mean 'deny'?"),
    ("rules:\n  - deny: a.b\n    ops: x\n", 3, "unknown key 'ops' in a rule; did you mean 'op'?"),
    ("rules:\n  - deny: a.b\n    deny: a.c\n", 3,
     "'deny' is given twice in a rule, first on line 2"),
    ("rules:\n  - deny: 5\n", 2, "deny wants a pattern or a list of patterns, got 5"),
    ("rules:\n  - deny: []\n", 2, "deny wants a pattern"),
    ("rules:\n  - deny: [a.b, 5]\n", 2, "deny wants a pattern"),
    ("rules:\n  - deny: {a.b: 1}\n", 2, "wants a plain value, got a mapping"),
    ("rules:\n  - lock: flash_attn@2\n", 2, "a kernel pattern has a-z 0-9"),
    ("rules:\n  - deny: a.b\n    op:\n", 3, "op wants a pattern or a list of patterns, got None"),
    ("rules:\n  - deny: a.b\n    factor: 2\n", 2, "deny takes no factor"),
    ("rules:\n  - boost: a.b\n", 2, "boost wants a factor"),
    ("rules:\n  - boost: {a.b: 2}\n    factor: 2\n", 3, "boost has its factors already"),
    ("rules:\n  - boost: {a.b: 0}\n", 2, "the factor must be a number > 0, got 0"),
    ("rules:\n  - boost: {a.b: 2, a.b: 3}\n", 2, "'a.b' is given twice in boost"),
    ("rules:\n  - boost: a.b\n    factor: .nan\n", 2, "the factor must be a number > 0"),
    # conditions
    ("rules:\n  - deny: a.b\n    when:\n", 3, "when is empty"),
    ("rules:\n  - deny: a.b\n    when: {}\n", 3, "when is empty"),
    ("rules:\n  - deny: a.b\n    when: head_dim\n", 3, "when must be a mapping"),
    ("rules:\n  - deny: a.b\n    when:\n      head_dim: '> x'\n", 4,
     "head_dim: a comparison wants a number, got 'x'"),
    ("rules:\n  - deny: a.b\n    when:\n      head_dim: 1\n      head_dim: 2\n", 5,
     "'head_dim' is given twice"),
    ("rules:\n  - deny: a.b\n    when: {dtype: 2001-01-01}\n", 3, "dtype: wants text, a number"),
    # time
    ("rules:\n  - deny: a.b\n    for: 0\n", 3, "for must be a number of seconds > 0, got 0"),
    ("rules:\n  - deny: a.b\n    for: soon\n", 3,
     "for must be a number of seconds > 0, got 'soon'"),
    ("rules:\n  - deny: a.b\n    for: .nan\n", 3, "for must be a number of seconds > 0"),
    ("rules:\n  - deny: a.b\n    until: tomorrow\n", 3,
     "a time like 2030-12-31T18:00:00Z, got 'tomorrow'"),
    ("rules:\n  - deny: a.b\n    until: 5\n", 3, "until must be a time"),
    ("rules:\n  - deny: a.b\n    for: 5\n    until: 2030-01-01\n", 4,
     "a rule takes 'for' or 'until', not both"),
])
def test_an_error_says_file_line_and_what_to_do(load, text, line, message):
    with pytest.raises(ConfigError) as e:
        load(text)
    first = problems(e)[0]
    assert first[0] == line and message in first[1]
    assert str(e.value).endswith("nothing of this file was applied")


def test_all_errors_are_reported_together_in_order(load):
    with pytest.raises(ConfigError) as e:
        load(
            "version: 3\nsettings:\n  strict_mod: 1\n  cache_size: 0\nrules:\n  - lok: a.b\n  - "
            "deny: x/\n    when: {head_dim: '> a', seq_k: '9..1'}\n")
    assert [line for line, _ in problems(e)] == [1, 3, 4, 6, 7, 8, 8]
    text = str(e.value)
    for part in ("version must be 1", "got 'x/'", "did you mean 'strict_mode'",
                 "cache_size must be", "did you mean 'lock'", "head_dim: a comparison",
                 "seq_k: the range"):
        assert part in text


def test_at_most_ten_errors_are_shown(load):
    with pytest.raises(ConfigError) as e:
        load("settings:\n" + "".join(f"  nonsense_{i}: 1\n" for i in range(14)))
    assert len(problems(e)) == 10 and "... and 4 more" in str(e.value)


def test_names_of_ops_and_facts_are_checked_where_they_are_known(load):
    text = ("rules:\n  - deny: a.b\n    op: attenton\n  - {deny: a.b, op: attention, when: "
            "{head_dims: 3}}\n")
    assert len(load(text).rules) == 2
    with pytest.raises(ConfigError) as e:
        load(text, OPS)
    assert problems(e) == [(2, "deny: no op matches 'attenton'; did you mean 'attention'?"),
                           (4,
                            "deny: no op of attention has the fact 'head_dims'; did you mean "
                            "'head_dim'?")]


@pytest.mark.parametrize("make", [
    lambda tmp: tmp / "missing.yaml", lambda tmp: tmp, lambda tmp: tmp / "no" / "such"
    / "folder.yaml", lambda tmp: "a\0b.yaml"],
                         ids=["missing", "folder", "missing folder", "null byte"])
def test_a_file_that_cannot_be_read(tmp_path, make):
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=r"wanted a policy file; .*LAYERZERO_POLICY") as e:
        load_policy_file(path)
    assert str(e.value).strip("'").startswith(str(path).replace("\0", "\\x00"))


def test_a_file_without_permission(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")
    with pytest.raises(ConfigError, match="Permission denied"):
        load_policy_file(path)


def test_a_file_that_is_not_utf8(load):
    with pytest.raises(ConfigError, match="in UTF-8; byte 3"):
        load(b"a: \xff\xfe")


def test_yaml_is_imported_only_to_read_a_file():
    code = ("import sys, layerzero.world.config as c; c.environment_layer({}); assert 'yaml' not "
            "in sys.modules")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert run_python("-c", code, env=env).returncode == 0


def test_time_boxed_rules(load):
    before = time.monotonic()
    hour = (datetime.now(timezone.utc) + timedelta(hours=1)).replace(microsecond=0)
    # the same moment: with Z, with an offset, without a zone (UTC, as YAML has it), and quoted
    zones = [hour.strftime("%Y-%m-%dT%H:%M:%SZ"),
             hour.astimezone(timezone(timedelta(hours=2))).isoformat(),
             hour.strftime("%Y-%m-%dT%H:%M:%S"), '"' + hour.strftime("%Y-%m-%dT%H:%M:%SZ") + '"']
    layer = load("rules:\n  - {deny: a.b, for: 600}\n" + "".join(f"  - {{deny: a.b, until: {z}}}\n"
                                                                 for z in zones)
                 + "  - {deny: a.b, until: 2001-01-01}\n  - {deny: a.b}\n")
    after = time.monotonic()
    ends = [rule.expires_at for rule in layer.rules]
    assert before + 600 <= ends[0] <= after + 600
    assert all(before + 3590 < end <= after + 3600 for end in ends[1:5])
    assert ends[5] < before and ends[6] is None
    assert len(Policy((layer,)).at(after).layers[0].rules) == 6     # the past one is gone at once


junk = st.one_of(
    st.text(), st.text(alphabet="abk:-[]{}#&*!|>'\"%@`,?\n\t 0123456789.<=~"),
    st.binary().map(lambda b: b.decode("latin-1")))
words = st.sampled_from(["version", "settings", "rules", "lock", "deny", "allow", "boost", "op",
                         "when", "for", "until", "factor", "head_dim", "torch.*", "strict_mode",
                         "cache_size", "> 128", "1..2", "a.b", "*", ""])
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words,
                    st.text(max_size=5), st.dates(),
                    st.datetimes())
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(words | scalars, inner, max_size=4),
    max_leaves=12)


def only_a_layer_or_a_config_error(tmp_path, text):
    path = tmp_path / "policy.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        layer = load_policy_file(path)
    except ConfigError as e:
        assert str(e).startswith(str(path))
        return
    assert layer.name == "file"
    assert Policy((layer,)).hash


@reuse_tmp_path
@given(junk)
@example("rules: [{boost: {a.b: " + "9" * 5000 + "}}]")
@example("settings: {cache_size: " + "9" * 5000 + "}")
@example("settings: {cache_size: 0x" + "f" * 5000 + "}")
@example("rules: [{deny: a.b, when: {head_dim: 0x" + "f" * 5000 + "}}]")
@example("rules: [{deny: a.b, when: {head_dim: '> " + "9" * 400 + "'}}]")
@example("settings: {cache_size: 1:99:99:99}")
@example(
    "rules: [{deny: a.b, until: 9999-12-31T23:59:59-23:59}, {deny: a.b, until: "
    "0001-01-01T00:00:00+23:59}]")
@example("rules: [{deny: a.b, for: 1.0e+308}]")
@example("? {a: b}\n: {c: d}")
@example("<<: {a: 1}")
@example("\ud800")
def test_junk_text_only_ever_gives_a_config_error(tmp_path, text):
    only_a_layer_or_a_config_error(tmp_path, text)


@reuse_tmp_path
@given(st.fixed_dictionaries({}, optional={"version": st.just(1), "settings": trees,
                                           "rules": st.lists(st.dictionaries(words, trees,
                                                                             max_size=4),
                                                             max_size=3)}))
def test_well_formed_yaml_of_the_wrong_shape_only_ever_gives_a_config_error(tmp_path, tree):
    only_a_layer_or_a_config_error(tmp_path, yaml.safe_dump(tree))


# watching it

def test_reload_takes_a_change_and_keeps_the_old_layer_when_the_file_breaks(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("settings: {cache_size: 5}")
    stamp, layer, error = reload_if_changed(path, None, None)
    assert layer.settings["cache_size"] == 5 and error is None and stamp == FileStamp.of(path)
    assert reload_if_changed(path, stamp, layer) == (stamp, layer, None)

    path.write_text("settings: {cache_size: }broken")
    stamp, kept, error = reload_if_changed(path, stamp, layer)
    assert kept is layer and isinstance(error, ConfigError) and "policy.yaml:1:" in str(error)
    assert reload_if_changed(path, stamp, kept) == (stamp, layer, None)  # said once

    path.unlink()
    stamp, kept, error = reload_if_changed(path, stamp, kept)
    assert stamp is None and kept is layer and "cannot read" in str(error)
    assert reload_if_changed(path, stamp, kept) == (None, layer, None)

    path.write_text("settings: {cache_size: 7}")
    stamp, layer, error = reload_if_changed(path, stamp, layer)
    assert layer.settings["cache_size"] == 7 and error is None


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_seen(tmp_path):
    path, other = tmp_path / "policy.yaml", tmp_path / "new.yaml"
    path.write_text("settings: {cache_size: 5}")
    other.write_text("settings: {cache_size: 6}")
    for p in (path, other):
        os.utime(p, ns=(10 ** 18, 10 ** 18))
    stamp, layer, _ = reload_if_changed(path, None, None)
    os.replace(other, path)
    assert reload_if_changed(path, stamp, layer)[1].settings["cache_size"] == 6


def test_no_file_has_no_stamp(tmp_path):
    assert FileStamp.of(tmp_path / "none") is None and FileStamp.of("a\0b") is None


# the environment

def test_nothing_set_is_no_layer():
    assert environment_layer({}) is None
    assert environment_layer({"PATH": "/bin", "LAYERZERO_POLICY": "x",
                              "LAYERZERO_CACHE_DIR": "y"}) is None
    assert environment_layer({"LAYERZERO_STRICT_MODE": "", "LAYERZERO_DENY": " ",
                              "LAYERZERO_LOCK": ""}) is None


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_has_its_variable(name):
    word = {"jit": "never", "redact": "paths", "isolation": "torch.*=worker"}.get(name, "error")
    text = {bool: "yes", int: "7", float: "1.0", str: word}[SETTINGS[name].type]
    layer = environment_layer({f"LAYERZERO_{name.upper()}": text})
    assert dict(layer.settings) == {name: {bool: True, int: 7, float: 1.0,
                                           str: word}[SETTINGS[name].type]}


@pytest.mark.parametrize(("old", "new"), [("1", "in_request"), ("no", "never")])
def test_allow_jit_is_still_read_and_says_what_it_is_called_now(old, new, tmp_path):
    with pytest.warns(DeprecationWarning, match=f"write jit: {new}"):
        layer = environment_layer({"LAYERZERO_ALLOW_JIT": old})
    assert (dict(layer.settings) == {"jit": new}
            and Policy((layer,)).setting("allow_jit") is (new == "in_request"))
    (tmp_path / "policy.yaml").write_text(f"version: 1\nsettings: {{allow_jit: {old}}}\n")
    with pytest.warns(DeprecationWarning, match=f"write jit: {new}"):
        assert dict(load_policy_file(tmp_path / "policy.yaml").settings) == {"jit": new}
    with pytest.warns(DeprecationWarning):
        assert dict(Layer("file", {"jit": "background", "allow_jit": old}).settings) == {
            "jit": "background"}
    with pytest.raises(ConfigError,
                       match="allow_jit must be true or false, got 'maybe'; it is deprecated"):
        Layer("file", {"allow_jit": "maybe"})


@pytest.mark.parametrize(("text", "want"), [(t, w) for w, texts in (
    (True, ("1", "true", "yes", "on", "TRUE", " On ")),
    (False, ("0", "false", "no", "off", "False"))) for t in texts])
def test_booleans_in_the_environment(text, want):
    assert environment_layer({"LAYERZERO_NATIVE": text}).settings["native"] is want


def test_rules_in_the_environment():
    layer = environment_layer({
        "LAYERZERO_LOCK": "attention=torch.sdpa_math; rms_norm, layer_norm = torch.*,triton.* ;",
        "LAYERZERO_DENY": "flash_attn.*, flashinfer.*", "LAYERZERO_ALLOW": "torch.*"})
    assert layer.name == "environment" and layer.rules == (
        PolicyRule.of("allow", "torch.*", origin="LAYERZERO_ALLOW"),
        PolicyRule.of("deny", ["flash_attn.*", "flashinfer.*"], origin="LAYERZERO_DENY"),
        PolicyRule.of("lock", "torch.sdpa_math", "attention", origin="LAYERZERO_LOCK"),
        PolicyRule.of("lock", ["torch.*", "triton.*"], ["rms_norm", "layer_norm"],
                      origin="LAYERZERO_LOCK"))


@pytest.mark.parametrize(("variable", "text", "message"), [
    ("LAYERZERO_STRICT", "1", "unknown variable; did you mean 'LAYERZERO_STRICT_MODE'?"),
    ("LAYERZERO_POLICY_FILE", "x", "did you mean 'LAYERZERO_POLICY'?"),
    ("LAYERZERO_BOOST", "a.b=2", "unknown variable"),
    ("LAYERZERO_STRICT_MODE", "maybe", "strict_mode must be true or false, got 'maybe'"),
    ("LAYERZERO_CACHE_SIZE", "-3", "cache_size must be a whole number >= 1, got '-3'"),
    ("LAYERZERO_LOCK", "torch.sdpa_math",
     "wants op=kernel pairs separated by ';', got 'torch.sdpa_math'"),
    ("LAYERZERO_LOCK", "attention=", "lock names no kernel"),
    ("LAYERZERO_LOCK", "=a.b", "lock names no op"),
    ("LAYERZERO_LOCK", "attention=flash_attn@2", "got 'flash_attn@2'"),
    ("LAYERZERO_DENY", ",", "deny names no kernel"),
    ("LAYERZERO_DENY", "Flash!", "a kernel pattern has a-z"),
])
def test_a_bad_variable_is_named(variable, text, message):
    with pytest.raises(ConfigError) as e:
        environment_layer({variable: text})
    assert f"{variable}={text}: " in str(e.value) and message in str(e.value)


def test_all_bad_variables_are_named_together_and_ops_are_checked_where_known():
    environ = {"LAYERZERO_NATIVE": "x", "LAYERZERO_CACHE_SIZES": "1",
               "LAYERZERO_LOCK": "attenton=a.b"}
    with pytest.raises(ConfigError) as e:
        environment_layer(environ, OPS)
    assert (all(f"{v}=" in str(e.value) for v in environ)
            and "did you mean 'attention'" in str(e.value))


@steady
@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)), st.text(max_size=20)))
def test_any_environment_gives_a_layer_or_a_config_error(environ):
    try:
        layer = environment_layer(environ)
    except ConfigError as e:
        assert "LAYERZERO_" in str(e)
        return
    assert layer is None or layer.name == "environment"


def test_the_real_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_SIZE", "77")
    monkeypatch.setenv("LAYERZERO_POLICY", "~/p.yaml")
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", "/somewhere")
    assert environment_layer().settings["cache_size"] == 77
    assert policy_path() == Path.home() / "p.yaml" and cache_dir() == Path("/somewhere")


@pytest.mark.parametrize(("environ", "want"), [
    *((environ, Path.home() / ".cache" / "layerzero")
      for environ in ({}, {"XDG_CACHE_HOME": "relative"}, {"XDG_CACHE_HOME": ""})),
    ({"XDG_CACHE_HOME": "/x"}, Path("/x/layerzero")),
    ({"LAYERZERO_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}, Path("/c")),
    ({"LAYERZERO_CACHE_DIR": "~/c"}, Path.home() / "c"),
])
def test_the_cache_folder(environ, want):
    assert cache_dir(environ) == want


def test_paths():
    assert policy_path({}) is None and policy_path({"LAYERZERO_POLICY": " "}) is None
    assert policy_path({"LAYERZERO_POLICY": "/a/b.yaml"}) == Path("/a/b.yaml")
    with pytest.raises(ConfigError, match="set LAYERZERO_POLICY to an absolute path"):
        policy_path({"LAYERZERO_POLICY": "~no_such_user_here/x"})


# calls

def test_a_programmatic_layer_adds_to_the_old_one():
    first = programmatic_layer(None, {"cache_size": 5, "native": False},
                               [PolicyRule.of("deny", "a.*")])
    assert first.name == "programmatic"
    lock_b, lock_c = (PolicyRule.of("lock", kernel, "attention", origin=kernel)
                      for kernel in ("a.b", "a.c"))
    second = programmatic_layer(first, {"cache_size": 6}, [lock_b])
    third = programmatic_layer(second, {}, [lock_c])
    assert dict(third.settings) == {"cache_size": 6, "native": False}
    # the same subject: the newer lock replaces
    assert third.rules == (lock_c, *first.rules)
    assert programmatic_layer(third).rules == third.rules
    assert first.rules == (PolicyRule.of("deny", "a.*"),)      # the old one is as it was


def test_new_locks_come_first_and_boosts_do_not_pile_up():
    general, special = PolicyRule.of("lock", "a.b"), PolicyRule.of("lock", "a.c",
                                                                   when={"head_dim": 64})
    layer = programmatic_layer(programmatic_layer(None, {}, [general]), {}, [special])
    assert Policy((layer,)).lock("attention", {"head_dim": 64}) is special
    assert Policy((layer,)).lock("attention", {"head_dim": 128}) is general
    for factor in (2, 3):
        layer = programmatic_layer(layer, {}, [PolicyRule.of("boost", "a.*", factor=factor)])
    assert Policy((layer,)).boost("a.b", "attention", {}) == 3.0


def test_a_programmatic_layer_is_checked():
    with pytest.raises(ConfigError, match="did you mean 'strict_mode'"):
        programmatic_layer(None, {"strict_modes": True})
    assert programmatic_layer(None, {}, name="context").name == "context"


sayings = st.tuples(st.sampled_from(["cache_size", "breaker_threshold"]), st.integers(1, 99),
                    st.none() | st.integers(1, 20).map(float))


@steady
@given(st.lists(sayings, max_size=5), st.integers(0, 21))
def test_what_is_said_for_a_time_ends_alone_and_what_held_before_holds_again(said, now):
    layer = None
    for name, value, expires_at in said:
        layer = programmatic_layer(layer, {name: value},
                                   [PolicyRule.of("boost", "a.*", name, factor=value)],
                                   expires_at=expires_at)
    policy = Policy((layer,) if layer else ()).at(float(now))
    want = {name: value for name, value, expires_at in said if expires_at is None
            or now < expires_at}
    assert {**(policy.layers[0].settings if policy.layers else {})} == want
    assert {name: policy.boost("a.b", name, {}) for name in want} == want


def test_a_lock_with_a_deadline_covers_the_old_one_until_then():
    forever, short = PolicyRule.of("lock", "a.b"), PolicyRule.of("lock", "a.c", expires_at=50.0)
    policy = Policy((programmatic_layer(programmatic_layer(None, {}, [forever]), {}, [short]),))
    assert (policy.lock("attention", {}) is short
            and policy.at(50.0).lock("attention", {}) is forever)


def test_rules_are_taken_out_of_what_holds_later_too():
    lock, deny = PolicyRule.of("lock", "a.b", "attention"), PolicyRule.of("deny", "a.c")
    layer = programmatic_layer(programmatic_layer(None, {}, [lock, deny]), {"strict_mode": True},
                               expires_at=50.0)
    left = layer.keep_rules(lambda rule: rule.action != "lock")
    assert (left.rules == (deny,) and left.expires_at == 50.0
            and left.settings["strict_mode"] is True)
    assert Policy((left,)).at(60.0) == Policy((Layer("programmatic", {}, (deny,)),))


# all of them

def test_every_source_has_its_rank(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(
        "settings: {cache_size: 1, breaker_threshold: 1, cache_ttl: 1, log_level: info, perfdb: "
        "file}\nrules:\n  - {lock: a.file, op: attention}\n")
    policy = Policy((load_policy_file(path),))
    assert policy.setting("cache_size") == 1 and policy.lock("attention", {}).kernels == ("a.file",)
    environ = {"LAYERZERO_CACHE_SIZE": "2", "LAYERZERO_BREAKER_THRESHOLD": "2",
               "LAYERZERO_CACHE_TTL": "2",
               "LAYERZERO_LOG_LEVEL": "error", "LAYERZERO_LOCK": "attention=a.environment"}
    policy = policy.with_layer(environment_layer(environ))
    assert (policy.setting("cache_size") == 2
            and policy.lock("attention", {}).origin == "LAYERZERO_LOCK")
    for rank, name in enumerate(("programmatic", "context", "call"), 3):
        lock = PolicyRule.of("lock", f"a.{name}", "attention")
        keys = ("cache_size", "breaker_threshold", "cache_ttl")[:6 - rank]
        policy = policy.with_layer(programmatic_layer(None, dict.fromkeys(keys, rank), [lock],
                                                      name=name))
        assert policy.lock("attention", {}) is lock
    want = {"cache_size": 5, "breaker_threshold": 4, "cache_ttl": 3.0, "log_level": "error",
            "perfdb": "file"}
    assert {name: policy.setting(name) for name in want} == want


# the reference page

DOCS = Path(__file__).parents[3] / "docs" / "policy.md"


def test_the_reference_page_names_every_setting_and_variable():
    text = DOCS.read_text("utf-8")
    table = re.search(r"<!-- generated:settings -->\n(.*)<!-- /generated:settings -->", text,
                      re.DOTALL)[1]
    for name, setting in SETTINGS.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
        assert setting.doc in row
    assert all(f"`{v}`" in text for v in VARIABLES
               if v.removeprefix("LAYERZERO_").lower() not in SETTINGS)
    assert all(f"`{action}`" in text for action in ACTIONS)


def test_every_example_on_the_reference_page_is_read_and_every_error_is_the_real_one(tmp_path,
                                                                                     monkeypatch):
    text = DOCS.read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```yaml\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.DOTALL)
    assert len(examples) >= 3
    for source, error in examples:
        Path("policy.yaml").write_text(source)
        if error:
            with pytest.raises(ConfigError) as e:
                load_policy_file("policy.yaml")
            assert str(e.value) == error.strip()
        else:
            assert load_policy_file("policy.yaml")
    shell = re.findall(r"```console\n\$ (LAYERZERO_\w+)=(\S*) .*?\n(.*?)```", text, re.DOTALL)
    assert shell
    for variable, value, error in shell:
        with pytest.raises(ConfigError) as e:
            environment_layer({variable: value})
        assert error.strip() == f"layerzero.spec.errors.ConfigError: {e.value}"
