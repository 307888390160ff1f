"""Rotary positions: against the models that use them, both conventions, every scaling, and what a
caller does wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import Fake, path_of, register

import layerzero as lz
from layerzero.models.positions import rope_tables, xpos_tables
from layerzero.ops.formulas.rope import rotate
from layerzero.selection.policy import Layer
from layerzero.verify.kernel.contract import check_case
from layerzero.world import snapshot as worlds

ROPE = lz.op("rope")
STYLES = ("rotate_half", "interleaved")


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(rows: int = 16, dim: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_tables(dim, rows)


# The same as the models.

def test_rotate_half_is_what_llama_does():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = rand(2, 4, 9, 64), rand(2, 2, 9, 64, seed=1)
    cos, sin = tables(9, 64)
    doubled = [torch.cat((t, t), -1)[None] for t in (cos, sin)]
    want = llama.apply_rotary_pos_emb(q, k, *doubled)
    got = lz.rope(q, k, cos, sin, style="rotate_half")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_interleaved_is_what_gptj_does():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    q = rand(2, 9, 4, 64)                      # its tensors are (batch, seq, heads, dim)
    cos, sin = tables(9, 64)
    want = gptj.apply_rotary_pos_emb(q, sin[None], cos[None])
    got = lz.rope(q, None, cos, sin, style="interleaved", layout="bshd")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_packed_tokens_with_a_partial_table_in_bfloat16():
    """The published workload rope_with_cos_sin_cache_neox_style_d128_rd64, answered by its own
    formula."""
    q, k = rand(37, 6, 128, dtype=torch.bfloat16), rand(37, 2, 128, seed=1, dtype=torch.bfloat16)
    cos_sin_cache = torch.cat(rope_tables(128, 512, rotary_dim=64), -1)
    positions = torch.randint(0, 512, (37,), generator=torch.Generator().manual_seed(3))

    def neox(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (t.unsqueeze(-2) for t in cos_sin_cache[positions].chunk(2, -1))
        turning, rest = x.float()[..., :64], x.float()[..., 64:]
        one, two = turning.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), -1).to(x.dtype)

    cos, sin = cos_sin_cache.chunk(2, -1)
    got = lz.rope(q, k, cos, sin, positions, style="rotate_half", layout="bshd", rotary_dim=64)
    for out, x in zip(got, (q, k)):
        torch.testing.assert_close(out, neox(x), rtol=1e-2, atol=1e-2)
        assert torch.equal(out[..., 64:], x[..., 64:])


@pytest.mark.parametrize("style", STYLES)
def test_all_ways_to_say_the_same(style):
    """Layouts, ids into a table or rows for each token, one batch or none."""
    q, k = rand(2, 4, 5, 8), rand(2, 2, 5, 8, seed=1)
    cos, sin = tables(32)
    ids = torch.tensor([[3, 4, 5, 6, 7], [9, 1, 30, 0, 2]])
    want = lz.rope(q, k, cos, sin, ids, style=style)
    ways = (
        lz.rope(q, k, cos[ids], sin[ids], style=style),
        lz.rope(q, k, cos, sin, ids.int(), style=style),
        [t.transpose(1, 2) for t in lz.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, ids,
                                            style=style,
                                            layout="bshd")],
        [torch.stack(t)
         for t in zip(*(lz.rope(q[i], k[i], cos, sin, ids[i], style=style) for i in range(2)))],
        (lz.rope(q, None, cos, sin, ids, style=style),
         lz.rope(k, None, cos, sin, ids, style=style)))
    for way in ways:
        torch.testing.assert_close(tuple(way), want, rtol=1e-6, atol=1e-6)
    shared = lz.rope(q, k, cos, sin, ids[:1], style=style)
    torch.testing.assert_close(shared, lz.rope(q, k, cos, sin, ids[:1].expand(2, 5), style=style),
                               rtol=0, atol=0)


@pytest.mark.parametrize("style", STYLES)
def test_it_is_a_rotation(style):
    q, (cos, sin) = rand(1, 2, 16, 8), tables()
    out = lz.rope(q, None, cos, sin, style=style)
    torch.testing.assert_close(out.norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(lz.rope(out, None, cos, -sin, style=style), q)
    # Scores depend on the distance of two tokens only.
    one = lz.rope(rand(1, 1, 1, 8).expand(1, 1, 16, 8), None, cos, sin, style=style)
    other = lz.rope(rand(1, 1, 1, 8, seed=1).expand(1, 1, 16, 8), None, cos, sin, style=style)
    scores = (one @ other.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-5)


# A kernel that is right for the other convention keeps every norm, and is wrong.

class _OtherConvention(Fake):
    """Right in every respect but one."""

    def _load(self):
        def run(q, k, cos, sin, position_ids=None, *, style, layout="bhsd", rotary_dim=None):
            other = STYLES[1 - STYLES.index(style)]
            return ROPE.reference(q, k, cos, sin, position_ids, style=other, layout=layout,
                                  rotary_dim=rotary_dim)

        return run


def test_a_kernel_of_the_wrong_convention_is_found_out_though_norms_agree(world):
    fake = _OtherConvention("fake.rope", ROPE)
    register(fake)
    q, k, (cos, sin) = rand(1, 4, 16, 8), rand(1, 2, 16, 8, seed=1), tables()
    out, out_k = lz.rope(q, k, cos, sin, style="rotate_half", backend="fake.rope")
    # a test of norms sees nothing
    torch.testing.assert_close(out.norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(out_k.norm(dim=-1), k.norm(dim=-1))
    # nor does one of the first position
    assert torch.equal(out[:, :, 0], q[:, :, 0])
    torch.testing.assert_close(out, ROPE.reference(q, k, cos, sin, style="interleaved")[0])
    failed = [r for case in ROPE.cases for r in [check_case(fake.kernel, case, "float32")]
              if r.status == "failed"]
    assert len(failed) > len(ROPE.cases) / 2 and "exceeds" in failed[0].detail


def test_the_convention_must_be_said():
    cos, sin = tables()
    with pytest.raises(TypeError, match="style"):
        lz.rope(rand(1, 2, 16, 8), None, cos, sin)
    with pytest.raises(lz.errors.InvalidCall,
                       match="style must be one of rotate_half, interleaved, got neox"):
        lz.rope(rand(1, 2, 16, 8), None, cos, sin, style="neox")


# Kernels.

@pytest.mark.parametrize(("kernel", "style"), [
    ("torch.rope", "rotate_half"), ("torch.rope", "interleaved"),
    ("torch.rope_complex", "interleaved"), ("reference.rope", "rotate_half"),
    ("reference.rope", "interleaved")])
@pytest.mark.parametrize("rotary", [8, 4])
def test_gradients(kernel, style, rotary):
    q, k = rand(2, 2, 3, 8, dtype=torch.float64), rand(2, 1, 3, 8, seed=1, dtype=torch.float64)
    cos, sin = (t.double() for t in rope_tables(8, 9, rotary_dim=rotary))
    ids = torch.tensor([[0, 5, 8], [2, 2, 1]])

    def run(*tensors):
        return lz.rope(*tensors, ids, style=style, rotary_dim=rotary, backend=kernel)

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in (q, k, cos, sin)])


@pytest.mark.parametrize("style", STYLES)
def test_gradients_in_float32_are_those_of_the_plain_formula(style):
    cos, sin = tables(16, 64)
    weights = rand(2, 4, 16, 64, seed=5)

    def gradient(run):
        q = rand(2, 4, 16, 64).requires_grad_()
        (run(q) * weights).sum().backward()
        return q.grad

    torch.testing.assert_close(gradient(lambda q: lz.rope(q, None, cos, sin, style=style)),
                               gradient(lambda q: rotate(q, cos, sin, style)), rtol=1e-5, atol=1e-6)


def test_which_kernel():
    q, k, (cos, sin) = rand(2, 8, 512, 64), rand(2, 8, 512, 64), tables(512, 64)
    torch_only = Layer("call", {}, (lz.PolicyRule.of("deny", "native.*"),))
    assert lz.which("rope", q, k, cos, sin, style="interleaved",
                    policy=torch_only) == "torch.rope_complex"
    assert lz.which("rope", q, k, cos, sin, style="rotate_half",
                    policy=torch_only) == "torch.rope"
    assert lz.which("rope", q.requires_grad_(), k, cos, sin, style="rotate_half") == "torch.rope"
    (reason,) = lz.validate("rope", "torch.rope_complex", q, k, cos, sin, style="rotate_half")
    assert reason.code is lz.Code.ROPE_STYLE_UNSUPPORTED and reason.got == "rotate_half"


@pytest.mark.parametrize("style", STYLES)
def test_under_vmap_and_compile(style):
    q, (cos, sin) = rand(3, 2, 4, 16, 8), tables()
    want = torch.stack([lz.rope(x, None, cos, sin, style=style) for x in q])
    torch.testing.assert_close(torch.vmap(lambda x: lz.rope(x, None, cos, sin, style=style))(q),
                               want)
    compiled = torch.compile(lambda x: lz.rope(x, x, cos, sin, style=style)[1] + 1, fullgraph=True,
                             backend="aot_eager")
    torch.testing.assert_close(compiled(q[0]), want[0] + 1)


# What a caller does wrong.

def _call(path, **changes):
    cos, sin = tables()
    values = {"q": rand(2, 4, 16, 8), "k": rand(2, 2, 16, 8), "cos": cos, "sin": sin,
              "style": "rotate_half", **changes}
    return path_of("rope", path)(**values)


WRONG = [
    ({"cos": torch.ones(15, 4), "sin": torch.ones(15, 4)}, "DIM_MISMATCH",
     r"cos\.shape\[-2\] must be 16"),
    ({"cos": torch.ones(1, 4), "sin": torch.ones(1, 4)}, "DIM_MISMATCH",
     r"cos\.shape\[-2\] must be 16"),
    ({"cos": torch.ones(3, 16, 4), "sin": torch.ones(3, 16, 4)}, "DIM_MISMATCH",
     "cos's leading shape"),
    ({"cos": torch.ones(2, 2, 16, 4), "sin": torch.ones(2, 2, 16, 4)}, "WRONG_NDIM",
     "cos must have 2 or 3 dimensions, got 4"),
    ({"cos": torch.ones(16, 8), "sin": torch.ones(16, 8)}, "DIM_MISMATCH",
     "columns come twice pass the first half"),
    ({"cos": torch.ones(16, 2), "sin": torch.ones(16, 2)}, "DIM_MISMATCH", "state rotary_dim"),
    ({"cos": torch.ones(16, 0), "sin": torch.ones(16, 0)}, "VALUE_OUT_OF_RANGE",
     "the width of cos and sin must be >= 1"),
    ({"sin": torch.ones(16, 3)}, "DIM_MISMATCH", r"sin\.shape"),
    ({"rotary_dim": 6}, "DIM_MISMATCH", r"cos\.shape\[-1\] must be 3"),
    ({"rotary_dim": 12}, "VALUE_OUT_OF_RANGE", "rotary_dim must be even and at most 8"),
    ({"rotary_dim": 7}, "VALUE_OUT_OF_RANGE", "rotary_dim must be even"),
    ({"rotary_dim": 0}, "VALUE_OUT_OF_RANGE", "rotary_dim must be >= 2"),
    ({"k": torch.ones(2, 2, 15, 8)}, "DIM_MISMATCH", r"k\.shape\[-2\]"),
    ({"k": torch.ones(3, 2, 16, 8)}, "DIM_MISMATCH", "k's leading shape"),
    ({"k": torch.ones(2, 2, 16, 8).half()}, "MIXED_DTYPES", "k must be float32"),
    ({"q": torch.ones(16, 8), "k": None}, "WRONG_NDIM", "q must have at least 3"),
    ({"q": torch.ones(1, 2, 4, 16, 8), "k": None}, "WRONG_NDIM",
     "q must have 3 or 4 dimensions, got 5"),
    ({"q": torch.ones(2, 4, 16, 8).long(), "k": None}, "DTYPE_UNSUPPORTED",
     "dtype must be float16"),
    ({"cos": torch.ones(16, 4).long()}, "DTYPE_UNSUPPORTED", r"cos\.dtype"),
    ({"position_ids": torch.zeros(2, 16)}, "DTYPE_UNSUPPORTED", "position_ids must be None or int"),
    ({"position_ids": torch.zeros(3, 16).long()}, "DIM_MISMATCH", "position_ids's leading shape"),
    ({"position_ids": torch.zeros(2, 15).long()}, "DIM_MISMATCH", r"position_ids\.shape\[-1\]"),
    ({"position_ids": torch.full((2, 16), 16)}, "VALUE_OUT_OF_RANGE",
     "position_ids must be between 0 and 15"),
    ({"position_ids": torch.full((2, 16), -1)}, "VALUE_OUT_OF_RANGE",
     "position_ids must be between 0 and 15"),
    ({"cos": torch.ones(2, 16, 4), "sin": torch.ones(2, 16, 4),
      "position_ids": torch.zeros(2, 16).long()},
     "DIM_MISMATCH", "cos must be a table"),
    ({"q": torch.ones(4, 16, 8), "k": None, "position_ids": torch.zeros(1, 16).long()},
     "DIM_MISMATCH",
     "position_ids's leading shape must be empty"),
    ({"layout": "sbhd"}, "LAYOUT_UNKNOWN", "layout must be one of bhsd, bshd"),
    ({"cos": None}, "WRONG_TYPE", "cos must be"),
]


@pytest.mark.parametrize(("changes", "code", "words"), WRONG)
def test_a_wrong_call_names_the_argument(path, world, changes, code, words):
    _call(path)                                # a remembered choice must not let it through
    _call(path, position_ids=torch.zeros(2, 16, dtype=torch.int64))
    for _ in range(2):
        with pytest.raises(lz.errors.InvalidCall, match=words) as raised:
            _call(path, **changes)
        assert code in raised.value.codes
    assert not worlds.current().health


def test_lengths_in_one_bucket_are_told_apart(path):
    """60 and 61 share a key; rows for 60 tokens must not serve 61."""
    q, (cos, sin) = rand(1, 2, 61, 8), tables(61)
    rope = path_of("rope", path)
    rope(q[:, :, :60], None, cos[:60], sin[:60], style="rotate_half")
    with pytest.raises(lz.errors.InvalidCall, match=r"cos\.shape\[-2\] must be 61"):
        rope(q, None, cos[:60], sin[:60], style="rotate_half")


# Tables: the frequencies that the models were trained with, to the last bit.

ORIGINAL = {"original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 8.0, **ORIGINAL},
    "yarn with mscale": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, **ORIGINAL},
    "yarn with betas": {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
                        **ORIGINAL},
    "yarn with attention_factor": {"factor": 4.0, "attention_factor": 0.9, **ORIGINAL},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "longrope": {"short_factor": [1.0 + i / 50 for i in range(32)],
                 "long_factor": [1.0 + i / 3 for i in range(32)],
                 "factor": 4.0, **ORIGINAL},
    "longrope with attention_factor": {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
                                       "factor": 4.0,
                                       "attention_factor": 1.3, **ORIGINAL},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}


def from_transformers(kind, settings, base=10000.0, head_dim=64, seq_len=None, positions=256,
                      max_positions=256):
    """cos and sin by transformers, for a Llama with these settings."""
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": kind, "rope_theta": base, **settings})
    turns, amplitude = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_len)
    angles = torch.arange(positions)[:, None].float() * turns
    return angles.cos() * amplitude, angles.sin() * amplitude


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("seq_len", [32, 200])
def test_scalings_are_those_of_transformers(name, base, seq_len):
    kind = name.partition(" ")[0]
    want = from_transformers(kind, SCALINGS[name], base, seq_len=seq_len)
    got = rope_tables(64, 256, base, {"rope_type": kind, **SCALINGS[name]}, seq_len=seq_len)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("seq_len", [10, 64, 65, 256])
def test_dynamic_ntk_follows_the_length(seq_len):
    want = from_transformers("dynamic", {"factor": 4.0}, seq_len=seq_len, max_positions=64)
    scaling = {"rope_type": "dynamic", "factor": 4.0, **ORIGINAL}
    got = rope_tables(64, 256, scaling=scaling, seq_len=seq_len)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert torch.equal(got[0], rope_tables(64, 256)[0]) == (seq_len <= 64)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_a_part_of_each_head(kind):
    settings = {**SCALINGS[kind], "partial_rotary_factor": 0.5}
    want = from_transformers(kind, settings)
    got = rope_tables(64, 256, scaling={"rope_type": kind, **settings})
    assert all(torch.equal(a, b) for a, b in zip(got, want)) and got[0].shape == (256, 16)
    plain = rope_tables(64, 256, scaling={"rope_type": kind, **SCALINGS[kind]}, rotary_dim=32)
    assert torch.equal(plain[0], got[0])


def test_the_plain_tables_are_those_of_llama():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = pytest.importorskip("transformers").LlamaConfig(hidden_size=128, num_attention_heads=2)
    want = llama.LlamaRotaryEmbedding(config)(torch.ones(1), torch.arange(300)[None])
    for got, doubled in zip(rope_tables(64, 300, 10000.0), want):
        assert torch.equal(torch.cat((got, got), -1), doubled[0])


def test_ntk_slows_the_slowest_pair_by_the_factor_and_leaves_the_fastest():
    scaled, plain = rope_tables(64, 2, scaling={"rope_type": "ntk", "factor": 4.0}), rope_tables(
        64, 2)
    angles, plain = (torch.atan2(sin, cos)[1] for cos, sin in (scaled, plain))
    torch.testing.assert_close(plain[-1] / angles[-1], torch.tensor(4.0), rtol=1e-4, atol=0)
    assert angles[0] == plain[0]


def test_factors_follow_from_the_length_where_not_said():
    yarn = {"rope_type": "yarn", **ORIGINAL}
    for table, want in zip(rope_tables(64, 256, scaling=yarn),
                           rope_tables(64, 256, scaling={**yarn, "factor": 4.0})):
        assert torch.equal(table, want)
    assert rope_tables(64, 256, scaling=yarn)[0][0, 0] == pytest.approx(0.1 * math.log(4) + 1)


def test_dtype_and_emptiness():
    cos, sin = rope_tables(8, 0, dtype=torch.bfloat16)
    assert cos.shape == sin.shape == (0, 4) and cos.dtype == sin.dtype == torch.bfloat16


def test_xpos_scores_depend_on_the_distance_and_fade_with_it():
    (cos_q, sin_q), (cos_k, sin_k) = xpos_tables(16, 64, scale_base=16.0)
    same = rand(1, 1, 1, 16, dtype=torch.float64).expand(1, 1, 64, 16)
    q = lz.rope(same, None, cos_q.double(), sin_q.double(), style="interleaved")[0, 0]
    k = lz.rope(same, None, cos_k.double(), sin_k.double(), style="interleaved")[0, 0]
    scores = q @ k.t()
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-6)
    # A pair with itself at distance n is worth cos(n * frequency) * zeta ** (n / scale_base).
    zeta, distance = (torch.arange(0, 16, 2) + 6.4) / 22.4, torch.arange(64)
    turns = rope_tables(16, 64)[0].double()
    pairs = same[0, 0, 0].view(8, 2).square().sum(-1)
    want = (pairs * turns * zeta ** (distance[:, None] / 16.0)).sum(-1)
    torch.testing.assert_close(scores[:, 0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("changes", "words"), [
    ({"head_dim": 7}, "rotary_dim must be even"), ({"head_dim": 0}, "head_dim must be an int >= 2"),
    ({"max_positions": -1}, "max_positions must be"), ({"base": 0.0}, "base must be > 0"),
    ({"rotary_dim": 66}, "rotary_dim must be even and between 2 and 64"),
    ({"seq_len": -1}, "seq_len must be"),
    ({"scaling": {"factor": 2.0}}, r"scaling\['rope_type'\] is required: one of default, linear"),
    ({"scaling": {"rope_type": "su"}}, r"scaling\['rope_type'\] must be one of default, linear"),
    ({"scaling": {"rope_type": "xpos"}}, "call xpos_tables"),
    ({"scaling": {"rope_type": "linear"}}, r"scaling\['factor'\] is required"),
    ({"scaling": {"rope_type": "linear", "factor": 0.0}}, r"scaling\['factor'\] must be > 0"),
    ({"scaling": {"rope_type": "linear", "factor": 2.0, "facter": 3.0}},
     "scaling must be made of factor"),
    ({"scaling": {"rope_type": "default", "rope_theta": 5e5}}, "base must be 500000.0 like"),
    ({"scaling": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
    ({"scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}, "rotary_dim": 16},
     "rotary_dim must be 32"),
    ({"scaling": {"rope_type": "ntk", "factor": 2.0}, "rotary_dim": 2},
     "rotary_dim must be at least 4"),
    ({"scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0],
                  **ORIGINAL}},
     r"scaling\['long_factor'\] must be 32 numbers"),
    ({"scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                  "high_freq_factor": 1.0, **ORIGINAL}},
     "high_freq_factor"),
])
def test_a_table_that_cannot_be_made_says_why(changes, words):
    with pytest.raises(lz.errors.InvalidCall, match=words):
        rope_tables(**{"head_dim": 64, "max_positions": 256, **changes})


def test_xpos_refuses_a_scale_base_of_nothing():
    with pytest.raises(lz.errors.InvalidCall, match="scale_base must be > 0"):
        xpos_tables(64, 8, scale_base=0.0)


def test_the_contract_itself_catches_tables_read_one_off(world):
    """The judge's cases tell position n from n + 1."""
    def shifted(q, k, cos, sin, position_ids=None, *, style, layout="bhsd", rotary_dim=None):
        return ROPE.reference(q, k, cos.roll(1, -2), sin.roll(1, -2), position_ids, style=style,
                              layout=layout)

    kernel = replace(Fake("fake.rope", ROPE).kernel, load=lambda: shifted)
    assert check_case(kernel, {}, "float32").status == "failed"
