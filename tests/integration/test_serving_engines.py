"""The plugins of vLLM and SGLang. vLLM's part runs against the Python of the real package where its
source is at hand (VLLM_SOURCE names it; no CUDA build is needed).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from layerzero.integrations import sglang, vllm
from layerzero.spec.errors import ConfigError

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
VLLM = os.environ.get("VLLM_SOURCE", "")


def run(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True,
                          text=True, timeout=240, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not VLLM and importlib.util.find_spec("vllm") is None,
                    reason="needs vLLM's Python: VLLM_SOURCE=<a checkout of it> make test-fleet")
def test_vllm_takes_the_provider_and_its_own_check_of_the_op_passes():
    """vLLM compares the signatures at registration; its input generators and tolerances judge."""
    run("""
        import torch
        from layerzero.integrations import vllm
        import layerzero as lz
        assert vllm.register() == vllm.register() == ("rms_norm", "fused_add_rms_norm")
        from vllm.ir.op import IrOp
        for name in vllm.register():
            op = IrOp.registry[name]
            assert op.get_priority() == []                      # offered, not put in force
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                args = op.generate_inputs(num_tokens=5, hidden_size=64, dtype=dtype)
                want = op.impls["native"].impl_fn(*args)
                with op.set_priority(["layerzero", "native"]):
                    assert op.dispatch(*args).provider == "layerzero"
                    assert op.dispatch(*args, 32).provider == "native"      # variance_size
                    torch.testing.assert_close(op(*args), want, **op.get_tolerance(dtype))
        assert all(f"lz.{name}" in str(lz.stats()) for name in ("rms_norm", "add_rms_norm"))
        """, PYTHONPATH=os.pathsep.join(filter(None, (VLLM, os.environ.get("PYTHONPATH")))))


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_sglang_takes_the_backend():
    run("""
        from layerzero.integrations import sglang
        sglang.register(), sglang.register()
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        assert ATTENTION_BACKENDS["layerzero"] is sglang.create_backend
        """)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None
                    or importlib.util.find_spec("sglang") is not None, reason="an engine is here")
def test_without_the_engine_the_error_says_what_is_needed():
    with pytest.raises(ConfigError, match=r"vllm\.ir"):
        vllm.register()
    with pytest.raises(ConfigError, match=r"sglang 0\.5"):
        sglang.register()


def test_the_entry_points_are_those_the_engines_look_for():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, module in (("vllm.general_plugins", vllm), ("sglang.srt.plugins", sglang)):
        name, _, function = points[group]["layerzero"].partition(":")
        assert getattr(importlib.import_module(name), function) is module.register


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("extend", [None, (4, 1, 6)], ids=["decode", "extend"])
def test_a_pool_of_tokens_is_attended_over_as_by_sglangs_loop(window, extend):
    """Against SDPA over the gathered keys of each sequence, as SGLang's torch_native backend."""
    gen = torch.Generator().manual_seed(0)
    lengths, new = torch.tensor((9, 1, 6)), torch.tensor(extend or (1, 1, 1))
    k, v = torch.randn(2, 64, 2, 16, generator=gen)
    query = torch.randn(int(new.sum()), 4, 16, generator=gen)
    table = torch.stack([torch.randperm(64, generator=gen)[:12] for _ in lengths])
    got = sglang.attend(query, k, v, table, lengths, torch.tensor(extend) if extend else None,
                        scaling=0.3, causal=extend is not None, sliding_window_size=window,
                        enable_gqa=True)
    start = 0
    for slots, length, count in zip(table, lengths.tolist(), new.tolist()):
        rows = slots[:length]
        positions = torch.arange(length - count, length)[:, None]
        keys = torch.arange(length)[None]
        mask = (keys <= positions) & (keys >= positions - (window if window is not None else 64))
        want = F.scaled_dot_product_attention(
            query[start:start + count].transpose(0, 1)[None], k[rows].transpose(0, 1)[None],
            v[rows].transpose(0, 1)[None], mask, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(got[start:start + count], want, rtol=1e-4, atol=1e-5)
        start += count


def test_a_logit_cap_is_refused_not_dropped():
    class Layer:
        logit_cap = 50.0

    with pytest.raises(ConfigError, match=r"no logit cap, this model has 50\.0"):
        sglang.check_layer(Layer())
