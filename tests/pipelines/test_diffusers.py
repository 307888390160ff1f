"""Pipelines of diffusers, patched: the same picture, state of one model only, masks honoured, all
of it undone.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

pytest.importorskip("diffusers", "0.36")
from diffusers.models import attention_dispatch
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from helpers import ATTENTION, ROOT, Fake, python, register
from tiny_pipelines import PIPELINES, denoiser, denoiser_inputs, image, pipeline, unet

import layerzero as lz
from layerzero.integrations.diffusers import (
    attn_processor,
    patch_diffusers,
    patched_diffusers,
    register_diffusers,
    unpatch_diffusers,
)

pytestmark = pytest.mark.integration
FULL = pytest.mark.skipif(os.environ.get("LZ_TEST_FULL") != "1",
                          reason="takes long; LZ_TEST_FULL=1 asks for it")


def run(model: nn.Module, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def far(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)).max())


class Wrong(Fake):
    """An attention kernel that gives zeros: whoever uses it makes another picture."""

    def __init__(self) -> None:
        super().__init__("fake.zeros", ATTENTION)

    def _load(self):
        honest = super()._load()

        def zeros(*args, **kwargs):
            return honest(*args, **kwargs) * 0

        zeros.__signature__ = honest.__signature__
        return zeros


# the same picture

@pytest.mark.parametrize("name", PIPELINES)
def test_the_same_picture_end_to_end(name, world):
    pipe = pipeline(name)
    stock = image(pipe, name, steps=3)
    fake = Fake("fake.attention", ATTENTION)
    register(fake)
    report = patch_diffusers(pipe)
    served = image(pipe, name, steps=3)
    assert far(served, stock) < 1e-4
    layers = sum(n for (part, _, op), n in report.replaced.items()
                 if part in ("unet", "transformer") and op == "attention")
    # each in every step, and those of text encoders and the decoder
    assert fake.calls > 3 * layers > 0
    assert report.count("mlp") and report.count("layer_norm") and report.count("group_norm")
    unpatch_diffusers(pipe)
    calls = fake.calls
    assert np.array_equal(image(pipe, name, steps=3), stock) and fake.calls == calls


def test_a_wrong_kernel_would_be_seen(world):
    pipe = pipeline("sd15")
    stock = image(pipe, "sd15")
    patch_diffusers(pipe)
    register(Wrong())
    assert far(image(pipe, "sd15"), stock) > 1e-3


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.bfloat16) for name in PIPELINES), ("sd15", torch.float16),
    ("flux", torch.float16)], ids=str)
def test_half_precision_is_no_worse_than_stock(name, dtype):
    model = denoiser(pipeline(name))
    truth = run(copy.deepcopy(model).double(), **denoiser_inputs(name, torch.float64, side=8))
    model.to(dtype)
    inputs = denoiser_inputs(name, dtype, side=8)
    stock = far(run(model, **inputs).double(), truth)
    patch_diffusers(model)
    out = run(model, **inputs)
    assert out.dtype == dtype and far(out.double(), truth) <= 2 * stock


@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_autocast(name):
    model, inputs = denoiser(pipeline(name)), denoiser_inputs(name, side=8)
    truth = run(model, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        stock = far(run(model, **inputs).float(), truth)
        patch_diffusers(model)
        assert far(run(model, **inputs).float(), truth) <= 2 * stock


@pytest.mark.parametrize("name", ["sd15", "sd3"])
def test_a_training_step_has_the_same_gradients(name):
    model, inputs = denoiser(pipeline(name)), denoiser_inputs(name)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model.train()(**inputs)[0].square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    stock = gradients()
    patch_diffusers(model)
    served = gradients()
    assert len(stock) == len(served) > 20
    for ours, theirs in zip(served, stock):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["sd15", "flux", pytest.param("pixart", marks=FULL)])
def test_the_denoiser_compiles_as_one_graph(name):
    torch._dynamo.reset()
    model, inputs = denoiser(pipeline(name)), denoiser_inputs(name)
    stock = run(model, **inputs)
    patch_diffusers(model)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        out = torch.compile(model, fullgraph=True, backend=backend)(**inputs)[0]
    assert far(out, stock) < 1e-4
    assert "layerzero.attention.default" in seen and "layerzero.mlp.default" in seen
    assert not [target for target in seen if "scaled_dot_product" in target
                or ("group_norm" in target
                and "layerzero" not in target)]
    torch._dynamo.reset()


@FULL
def test_other_lengths_recompile_no_more_than_stock():
    def frames(model: nn.Module) -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for tokens in (16, 24, 40):
            inputs = denoiser_inputs("flux")
            inputs |= {"hidden_states": torch.randn(2, tokens, 4),
                       "img_ids": torch.zeros(tokens, 3)}
            assert far(run(compiled, **inputs), run(model, **inputs)) < 1e-5
        return counter.frame_count

    model = denoiser(pipeline("flux"))
    stock = frames(model)
    patch_diffusers(model)
    assert frames(model) <= stock
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [pytest.param("sd15", marks=FULL), "flux"])
def test_the_denoiser_is_exported_and_read_back(name, tmp_path):
    model, inputs = denoiser(pipeline(name)), denoiser_inputs(name)
    patch_diffusers(model)
    want = run(model, **inputs)
    with torch.no_grad():
        exported = torch.export.export(model, (), inputs, strict=False)
    torch.export.save(exported, tmp_path / "denoiser.pt2")
    again = torch.export.load(tmp_path / "denoiser.pt2").module()
    assert far(run(again, **inputs), want) < 1e-5
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)shape|size|guard|constraint"):
        run(again, **denoiser_inputs(name, batch=1))       # its sizes are those of the example


# one model only

def test_another_model_is_not_touched(world):
    first, second = (denoiser(pipeline("flux", seed)) for seed in (0, 1))
    inputs = denoiser_inputs("flux")
    before = run(second, **inputs)
    active = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    fake = Fake("fake.attention", ATTENTION)
    register(fake)
    patch_diffusers(first)
    assert torch.equal(run(second, **inputs), before) and fake.calls == 0
    assert attention_dispatch._AttentionBackendRegistry.get_active_backend() == active
    run(first, **inputs)
    assert fake.calls == 2


def test_two_models_in_two_threads(world):
    """One patched, one not, at the same time: with a wrong kernel only the patched one goes wrong.
    """
    patched, stock = (denoiser(pipeline("sd15")) for _ in range(2))
    inputs = denoiser_inputs("sd15")
    right = run(stock, **inputs)
    patch_diffusers(patched)
    register(Wrong())
    results: dict[str, list[torch.Tensor]] = {"patched": [], "stock": []}
    barrier = threading.Barrier(2)

    def work(name: str, model: nn.Module) -> None:
        barrier.wait()
        results[name] = [run(model, **inputs) for _ in range(8)]

    threads = [threading.Thread(target=work, args=pair)
               for pair in (("patched", patched), ("stock", stock))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, right) for out in results["stock"]) and len(results["stock"]) == 8
    assert (all(far(out, right) > 1e-3 for out in results["patched"])
            and len(results["patched"]) == 8)


def test_a_processor_that_two_models_share():
    shared = FluxAttnProcessor()
    models = [denoiser(pipeline("flux")) for _ in range(2)]
    for model in models:
        model.set_attn_processor(shared)
    patch_diffusers(models[0])
    assert shared._attention_backend is None
    assert all(p is shared for p in models[1].attn_processors.values())
    assert len({id(p) for p in models[0].attn_processors.values()}) == 1


# undone

def test_unpatch_gives_back_the_same_objects():
    pipe = pipeline("sd3")
    parts = [m for p in pipe.components.values() if isinstance(p, nn.Module) for m in p.modules()]
    before = [(type(m), getattr(m, "processor", None)) for m in parts]
    keys = list(pipe.transformer.state_dict())
    with patched_diffusers(pipe):
        assert [type(m) for m in parts] != [cls for cls, _ in before]
        assert list(pipe.transformer.state_dict()) == keys
    for module, (cls, processor) in zip(parts, before):
        assert type(module) is cls and getattr(module, "processor", None) is processor


def test_to_patch_twice_changes_nothing():
    model = denoiser(pipeline("sd15"))
    first = patch_diffusers(model)
    processors = list(model.attn_processors.values())
    assert patch_diffusers(model) == first
    assert all(a is b for a, b in zip(processors, model.attn_processors.values()))
    unpatch_diffusers(model)
    assert all(type(p) is AttnProcessor2_0 for p in model.attn_processors.values())


def test_processors_made_of_the_class_of_ours_are_given_back_too():
    model = denoiser(pipeline("sd15"))
    patch_diffusers(model)
    # as IP-Adapters do
    model.set_attn_processor({name: type(p)() for name, p in model.attn_processors.items()})
    unpatch_diffusers(model)
    assert all(type(p) is AttnProcessor2_0 for p in model.attn_processors.values())


def test_what_others_put_there_since_stays():
    model = denoiser(pipeline("sd15"))
    patch_diffusers(model)
    mine = AttnProcessor()
    model.set_attn_processor(mine)
    unpatch_diffusers(model)
    assert all(p is mine for p in model.attn_processors.values())


def test_copied_pickled_and_saved(tmp_path):
    model, inputs = denoiser(pipeline("sd15")), denoiser_inputs("sd15")
    stock = run(model, **inputs)
    patch_diffusers(model)
    served = run(model, **inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, **inputs), served)
        unpatch_diffusers(other)
        assert torch.equal(run(other, **inputs), stock)
        assert not [m for m in other.modules() if hasattr(type(m), "_layerzero_diffusers")]
    assert torch.equal(run(model, **inputs), served)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(run(again, **inputs), stock)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    again.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))


def test_a_pickle_is_read_in_another_process(tmp_path):
    model = denoiser(pipeline("flux"))
    patch_diffusers(model)
    torch.save(model, tmp_path / "model.pt")
    output = python(f"""
        import torch
        model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
        print(next(iter(model.attn_processors.values()))._attention_backend.value)
    """)
    assert output.splitlines()[-1] == "layerzero"


# masks

def masks() -> dict[str, torch.Tensor]:
    """For 2 texts of 10 tokens, of which 4 and 10 are there; queries are 6."""
    there = torch.arange(10) < torch.tensor([[4], [10]])
    hidden = torch.zeros(2, 10).masked_fill(~there, -1e4)
    return {"bool 2-D": there, "additive 2-D": hidden, "bool 4-D": there[:, None, None],
            "minus infinity":
            torch.zeros(2, 1, 6, 10).masked_fill(~there[:, None, None], -torch.inf),
            "additive 4-D": hidden[:, None, None].expand(2, 3, 6, 10),
            "bool by query": torch.ones(6, 10).tril(4).bool()}


@pytest.mark.parametrize("kind", masks())
def test_the_backend_honours_a_mask(kind):
    register_diffusers()
    gen = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 3, 8, generator=gen) for n in (6, 10, 10))
    out, plain = (attention_dispatch.dispatch_attention_fn(query, key, value, attn_mask=mask,
                                                           backend="layerzero")
                  for mask in (masks()[kind], None))
    native = attention_dispatch.dispatch_attention_fn(query, key, value, attn_mask=masks()[kind],
                                                      backend="native")
    assert far(out, native) < 1e-5 < far(out, plain)
    if kind != "bool by query":                # what is hidden has no influence at all
        key[0, 4:], value[0, 4:] = 99.0, -99.0
        again = attention_dispatch.dispatch_attention_fn(
            query, key, value, attn_mask=masks()[kind], backend="layerzero")
        assert far(again, out) < 1e-5


def test_a_mask_of_float32_beside_half_precision():
    register_diffusers()
    query = torch.randn(2, 10, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = masks()["additive 2-D"][:, None, None]
    ours, theirs = (attention_dispatch.dispatch_attention_fn(query, query, query, attn_mask=mask,
                                                             backend=name)
                    for name in ("layerzero", "native"))
    assert ours.dtype == torch.bfloat16 and far(ours.float(), theirs.float()) < 2e-2


def test_a_processor_honours_a_mask():
    torch.manual_seed(0)
    layer = Attention(24, cross_attention_dim=16, heads=3, dim_head=8).eval()
    states, text = torch.randn(2, 6, 24), torch.randn(2, 10, 16)
    for mask in (masks()["additive 2-D"][:, None], None):
        stock = run_attention(layer, states, text, mask)
        layer.set_processor(attn_processor())
        assert far(run_attention(layer, states, text, mask), stock) < 1e-5
        layer.set_processor(AttnProcessor2_0())
    assert far(stock, run_attention(layer, states, text, masks()["additive 2-D"][:, None])) > 1e-3


def run_attention(layer: Attention, states: torch.Tensor, text: torch.Tensor | None,
                  mask: Any) -> torch.Tensor:
    with torch.no_grad():
        return layer(states, encoder_hidden_states=text, attention_mask=mask)


def test_a_masked_prompt_reaches_pixart():
    """What the mask hides must not change the output: the padding of a prompt, here."""
    model, inputs = denoiser(pipeline("pixart")), denoiser_inputs("pixart")
    patch_diffusers(model)
    before = run(model, **inputs)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].clone()
    inputs["encoder_hidden_states"][0, 5:] += 10
    assert far(run(model, **inputs), before) < 1e-5
    inputs["encoder_hidden_states"][0, 4] += 10
    assert far(run(model, **inputs), before) > 1e-4


@pytest.mark.parametrize("how", ["backend", "processor"])
def test_a_mask_and_causality_both_hide(how):
    register_diffusers()
    query, mask = torch.randn(1, 4, 4, 8), torch.rand(4, 4) > 0.3
    if how == "backend":                        # (batch, seq, heads, dim)
        out = attention_dispatch.dispatch_attention_fn(
            query, query, query, mask, 0.0, True, backend="layerzero").transpose(1, 2)
        query = query.transpose(1, 2)
    else:
        out = attn_processor(CausalToo())(query, mask)
    want = F.scaled_dot_product_attention(query, query, query, mask.tril())
    assert far(out, want) < 1e-5


class CausalToo:
    """A processor of a user that gives both."""

    def __call__(self, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask, is_causal=True)


# by name

def test_the_backend_by_its_name(world):
    register_diffusers()
    register_diffusers()
    assert list(attention_dispatch.AttentionBackendName.__members__).count("LAYERZERO") == 1
    model, inputs = denoiser(pipeline("flux")), denoiser_inputs("flux")
    stock = run(model, **inputs)
    fake = Fake("fake.attention", ATTENTION)
    register(fake)
    with attention_dispatch.attention_backend("layerzero"):
        assert far(run(model, **inputs), stock) < 1e-4 and fake.calls == 2
    assert torch.equal(run(model, **inputs), stock) and fake.calls == 2
    active, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    try:
        model.set_attention_backend("layerzero")
        assert far(run(model, **inputs), stock) < 1e-4 and fake.calls == 4
    finally:
        model.reset_attention_backend()
        attention_dispatch._AttentionBackendRegistry.set_active_backend(active)


def test_a_user_can_set_the_processor_alone(world):
    model, inputs = unet(), denoiser_inputs("sd15")
    model.eval()
    stock = run(model, **inputs)
    fake = Fake("fake.attention", ATTENTION)
    register(fake)
    model.set_attn_processor(attn_processor())
    assert far(run(model, **inputs), stock) < 1e-4 and fake.calls == len(model.attn_processors)


def test_log_sum_exp_as_diffusers_wants_it():
    register_diffusers()
    query = torch.randn(2, 5, 3, 8)
    out, lse = attention_dispatch.dispatch_attention_fn(
        query, query, query, attention_kwargs={"return_lse": True}, backend="layerzero")
    scores = torch.einsum("bqhd,bkhd->bqhk", query, query) / 8 ** 0.5
    assert far(lse, scores.logsumexp(-1)) < 1e-5 and out.shape == query.shape


# what is left or refused, and said

def test_context_parallelism_is_refused():
    model = denoiser(pipeline("flux"))
    config = object()
    first = next(iter(model.attn_processors.values()))
    first._parallel_config = config
    with pytest.raises(lz.errors.ConfigError,
                       match=r"cannot split a sequence over devices.*Nothing was patched"):
        patch_diffusers(model)
    assert not [m for m in model.modules() if hasattr(type(m), "_layerzero_diffusers")]
    with pytest.raises(ValueError, match="does not support context parallelism"):
        model.set_attention_backend("layerzero")
    query = torch.randn(1, 4, 2, 8)
    with pytest.raises(lz.errors.ConfigError, match="cannot split a sequence over devices"):
        attention_dispatch.dispatch_attention_fn(query, query, query, backend="layerzero",
                                                 parallel_config=config)


def test_what_is_left_is_said():
    pipe = pipeline("sd15")
    pipe.unet.set_attn_processor(AttnProcessor())
    report = patch_diffusers(pipe)
    text = str(report)
    assert "unet: AttnProcessor (computes attention by itself)" in text
    assert {"component": "unet", "class": "AttnProcessor", "why": "computes attention by itself",
            "count": 8} in (
        report.to_dict()["left"])
    assert ("vae", "AttnProcessor2_0", "attention") in report.replaced


def test_only_the_parts_asked_for():
    model = denoiser(pipeline("sd15"))
    assert patch_diffusers(model, parts=["attention"]).count("mlp") == 0
    assert not [m for m in model.modules() if hasattr(type(m), "_layerzero_diffusers")]
    with pytest.raises(lz.errors.ConfigError,
                       match="must be among attention, norm, mlp, linear, got attn"):
        patch_diffusers(model, parts="attn")


def test_a_hook_is_not_walked_around():
    """Offloading and LoRA change a layer by a hook or another class: such a layer must still do its
    own thing."""
    torch.manual_seed(0)
    layer, x = FeedForward(16).eval(), torch.randn(3, 16)
    patch_diffusers(layer)
    assert torch.allclose(layer(x), FeedForward.forward(layer, x), atol=1e-6)
    handle = layer.net[2].register_forward_hook(lambda module, args, out: out + 1)
    assert torch.allclose(layer(x), FeedForward.forward(layer, x), atol=1e-6)
    handle.remove()

    class Tuned(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    layer.net[0].proj.__class__ = Tuned
    assert torch.allclose(layer(x), FeedForward.forward(layer, x), atol=1e-6)
    norm = nn.LayerNorm(16)
    norm.forward = lambda x: x
    report = patch_diffusers(norm)
    assert (norm(x) is x
            and list(report.left) == [("", "LayerNorm", "its forward was replaced by a hook")])


def test_norms_of_all_kinds_agree():
    from diffusers.models.normalization import FP32LayerNorm, RMSNorm
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    layers = [nn.LayerNorm(16), nn.LayerNorm(16, elementwise_affine=False), FP32LayerNorm(16),
              nn.RMSNorm(16), nn.RMSNorm(16, eps=1e-3), RMSNorm(16, 1e-6),
              RMSNorm(16, 1e-6, elementwise_affine=False), RMSNorm(16, 1e-6, bias=True),
              nn.GroupNorm(5, 5), nn.LayerNorm((5, 16))]
    for layer in layers:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = x.to(dtype)
            stock = (layer(inputs) if dtype == torch.float32
                     or isinstance(layer, (FP32LayerNorm, RMSNorm)) else None)
            report = patch_diffusers(layer)
            if stock is not None:
                out = layer(inputs)
                assert out.dtype == stock.dtype
                torch.testing.assert_close(out, stock)
            unpatch_diffusers(layer)
    assert list(report.left) == [("", "LayerNorm", "normalises over several dimensions")]


@pytest.mark.parametrize("wrong", [None, "pipe", torch.zeros(1)])
def test_what_is_no_pipeline_is_refused(wrong):
    with pytest.raises(lz.errors.ConfigError,
                       match="wanted a pipeline or a model of diffusers, got"):
        patch_diffusers(wrong)
    with pytest.raises(lz.errors.ConfigError, match="wanted a processor that calls"):
        attn_processor(AttnProcessor())


def test_text_encoders_are_patched_as_models_of_transformers():
    pipe = pipeline("flux")
    classes = [type(m) for m in pipe.text_encoder.modules()]
    report = patch_diffusers(pipe)
    assert {("text_encoder", "attention", "attention"),
            ("text_encoder_2", "rms_norm", "rms_norm")} <= set(
        report.replaced)
    unpatch_diffusers(pipe)
    assert [type(m) for m in pipe.text_encoder.modules()] == classes
    report = patch_diffusers(pipe, parts=["norm"])
    assert {op for _, _, op in report.replaced} == {"layer_norm", "rms_norm", "group_norm"}


def test_the_page_tells_the_truth(capsys):
    page = (ROOT / "docs" / "diffusers.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)
    assert capsys.readouterr().out == shown[0]
