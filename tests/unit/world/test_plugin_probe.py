"""Plugins that would harm the process do it in another one, and are refused by name."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from layerzero.world.registry import catalog, plugin_probe

HARM = {
    "hangs": ("import time; time.sleep(600)", "no answer within 0.5 s"),
    "leaves": ("import os; os._exit(7)", "ended with status 7"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "killed by signal 11 (SIGSEGV)"),
    "interrupts": ("raise KeyboardInterrupt('now')", "KeyboardInterrupt: now"),
    "odd": ("class Odd(BaseException): pass\nraise Odd('of no kind')", "Odd: of no kind"),
    "floods": ("print('x' * 10**7)\nraise ImportError('after much ado')", "after much ado"),
    "empty": ("VALUE = 3", "without OP or KERNELS"),
    "escapes": (r"raise ImportError('\x1b[2J')", r"\x1b[2J"),
    "stays": ("import os; os._exit = os.write = lambda *_: None\nVALUE = 3",
              "without OP or KERNELS"),
    "lies": ("import os, sys\nframe = sys._getframe()\n"
             "while 'answer' not in frame.f_locals: frame = frame.f_back\n"
             "os.write(frame.f_locals['answer'], b'!')\nos.kill(os.getpid(), 9)",
             "killed by signal 9"),
    "raises": ("class K:\n    def __iter__(self): raise OSError('in its metadata')\n"
               "KERNELS = K()", "OSError: in its metadata")}
FINE = """
import layerzero as lz
KERNELS = (lz.Kernel("fine.rms_norm", lz.op("rms_norm"), lambda: None),)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Makes an entry point whose module says a text; `tried` has what was probed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    # a fork is believed: a fresh process would be asked after a crash, for seconds each
    monkeypatch.setattr(plugin_probe, "native_threads", lambda: 1)
    probe, tried = plugin_probe._probe, []
    monkeypatch.setattr(plugin_probe, "_probe",
                        lambda entry, *rest: tried.append(entry.name) or probe(entry, *rest))

    def make(name, text):
        (tmp_path / f"lz_probed_{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.metadata.EntryPoint(name, f"lz_probed_{name}", "layerzero.backends")

    make.tried = tried
    return make


def check(entry, **rest):
    plugin_probe.check(entry, f"{entry.name} 1.0", catalog._items, **rest)


@pytest.mark.parametrize("name", HARM)
def test_a_plugin_that_would_harm_does_so_elsewhere(plugin, name, monkeypatch):
    text, words = HARM[name]
    monkeypatch.setattr(plugin_probe, "SECONDS", 0.5 if name == "hangs" else 100.0)
    entry = plugin(name, text)
    for _ in range(2):
        with pytest.raises(plugin_probe.PluginHarmful) as refused:
            check(entry)
        assert words in str(refused.value)
    assert entry.module not in sys.modules
    # what raises may be gone when something else was installed; the others cost more to try
    assert len(plugin.tried) == (1 if name in ("hangs", "leaves", "crashes", "lies") else 2)
    if name == "hangs":                        # a clock that was set back does not refuse for long
        monkeypatch.setattr(plugin_probe.time, "time", lambda: 1e9)
        with pytest.raises(plugin_probe.PluginHarmful):
            check(entry)
        assert len(plugin.tried) == 2
    if name == "leaves":                       # the doctor asks anew
        with pytest.raises(plugin_probe.PluginHarmful):
            check(entry, again=True)
        assert len(plugin.tried) == 2


def test_what_passed_is_not_tried_again_until_its_files_change(plugin):
    entry = plugin("fine", FINE)
    check(entry)
    check(entry)
    assert plugin.tried == ["fine"] and entry.module not in sys.modules
    plugin("fine", FINE + "import os; os._exit(0)\n")
    with pytest.raises(plugin_probe.PluginHarmful, match="ended with status 0"):
        check(entry)
    assert plugin.tried == ["fine", "fine"]
    # a cache that is damaged, or cannot be written, costs a probe and nothing else
    plugin("fine", FINE)
    (plugin_probe.cache_dir() / plugin_probe.FILE).write_text("{not json")
    check(entry)
    assert plugin.tried == ["fine"] * 3
