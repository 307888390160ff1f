"""lz.patch on modules of all sorts: what is recognised by structure and numbers, what is refused,
and what survives.
"""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from helpers import collect_garbage
from models import inputs, tiny
from torch import nn
from torch.nn import functional as F

import layerzero as lz
from layerzero.integrations.transformers.patch import patch, patched, unpatch
from layerzero.integrations.transformers.replacements import KINDS, is_bare, recipe_of


class Scale(nn.Module):
    """An RMS norm by another name, with names of its own."""

    def __init__(self, width: int, tiny: float = 1e-5) -> None:
        super().__init__()
        self.gain, self.tiny = nn.Parameter(torch.ones(width)), tiny

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.tiny).rsqrt() * self.gain


class Gated(nn.Module):
    def __init__(self, width: int, activation=F.silu) -> None:
        super().__init__()
        self.b, self.a = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.out, self.activation = nn.Linear(2 * width, width), activation

    def forward(self, x):
        return self.out(self.activation(self.a(x)) * self.b(x))


class Home(nn.Module):
    """A model that nobody knows."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": Scale(width), "mlp": Gated(width)})
                                    for _ in range(2))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 11, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["mlp"](block["norm"](x))
        return self.head(self.last(x))


IDS = torch.arange(10).reshape(2, 5)


def kinds(model, **how):
    return patch(model, **how).counts()


def why(module, **how) -> str:
    """Why nothing of this module was patched."""
    report = patch(nn.ModuleList([module]), **how)
    assert not report.patched, report
    return "; ".join(row.why for row in report.left)


def test_a_model_that_nobody_knows():
    torch.manual_seed(0)
    model = Home()
    with torch.no_grad():
        stock = model(IDS)
        report = patch(model)
        assert report.counts() == {"rms_norm": 2, "mlp": 2, "layer_norm": 1, "linear": 1}
        assert [row.kind for row in report.left] == ["Embedding"]
        # a is the gate, whatever its name
        assert recipe_of(model.blocks[0]["mlp"]).names == ("a", "b", "out")
        torch.testing.assert_close(model(IDS), stock, rtol=1e-5, atol=1e-5)
        unpatch(model)
        assert model(IDS).equal(stock)


@pytest.mark.parametrize(("activation", "served"), [
    (F.silu, "swiglu"), (F.gelu, "geglu"), (lambda x: F.gelu(x, approximate="tanh"), "geglu_tanh"),
    (F.relu, "reglu"), (torch.sigmoid, ""), (lambda x: x * torch.sigmoid(1.702 * x), ""),
    (torch.tanh, "")])
def test_activations_are_told_apart(activation, served):
    mlp = Gated(16, activation)
    report = patch(mlp)
    assert (recipe_of(mlp).form if recipe_of(mlp) else "") == served, report
    assert (report.counts() == {"mlp": 1}) is bool(served)
    assert bool(served) or report.counts() == {"linear": 3}     # its layers are served one by one


class NormOf(nn.Module):
    def __init__(self, formula) -> None:
        super().__init__()
        self.weight, self.eps, self.formula = nn.Parameter(torch.ones(16)), 1e-6, formula

    def forward(self, x):
        return self.formula(x, self.weight, self.eps)


def mean_square(x):
    return x.square().mean(-1, keepdim=True)


@pytest.mark.parametrize(("formula", "offset"), [
    (lambda x, w, e: w * x * (mean_square(x) + e).rsqrt(), 0.0),
    (lambda x, w, e: (1 + w) * x * (mean_square(x) + e).rsqrt(), 1.0),
    (lambda x, w, e: w * x / (mean_square(x).sqrt() + e), None),          # the epsilon is elsewhere
    (lambda x, w, e: w * x * (mean_square(x) + 1e-5).rsqrt(), None),      # and here it is another
    (lambda x, w, e: w * x * (x.square().mean(1, keepdim=True) + e).rsqrt(), None),
    (lambda x, w, e: w * x * (x.square().sum(-1, keepdim=True) + e).rsqrt(), None),
    (lambda x, w, e: w * x * (mean_square(x.detach()) + e).rsqrt().detach() + w.detach(), None),
    # right, but without a gradient
    (lambda x, w, e: (w * x * (mean_square(x) + e).rsqrt()).detach(), None),
    (lambda x, w, e: (w * x * (mean_square(x) + e).rsqrt(), None), None),
    (lambda x, w, e: 1 / 0, None)])
def test_norms_are_told_apart(formula, offset):
    norm = NormOf(formula)
    patch(norm)
    assert (recipe_of(norm).offset if recipe_of(norm) else None) == offset


class Counting(nn.LayerNorm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class DoublingNorm(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Renamed(nn.LayerNorm):
    pass


class Wrapping(nn.Module):
    """As PEFT wraps a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.delta = base, nn.Parameter(torch.randn(base.weight.shape) * 0.1)

    def forward(self, x):
        return self.base_layer(x) + F.linear(x, self.delta)


def test_subclasses_are_judged_by_what_they_compute():
    assert kinds(Renamed(8)) == {"layer_norm": 1}
    assert "writes calls" in why(Counting(8))
    assert "neither" in why(DoublingNorm(8))
    assert "2 dimensions" in why(nn.LayerNorm((4, 8)))
    assert kinds(nn.LayerNorm(8, bias=False)) == kinds(
        nn.LayerNorm(8, elementwise_affine=False)) == {"layer_norm": 1}
    assert kinds(nn.RMSNorm(8, eps=1e-6)) == {"rms_norm": 1}
    assert "epsilon" in why(nn.RMSNorm(8))                # its epsilon follows the dtype


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_must_not_be_touched():
    own = nn.Linear(4, 4)
    own.forward = lambda x: x
    assert "accelerate" in why(own)
    assert "meta device" in why(nn.Linear(4, 4, device="meta"))
    assert "parametrized" in why(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    scripted = torch.jit.script(nn.Linear(4, 4))
    assert "torch.jit" in why(scripted)
    whole = nn.Linear(4, 4)
    whole.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    assert "int8" in why(whole)
    for stranger in (nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.Embedding(3, 3),
                     nn.Bilinear(2, 2, 2), nn.GRU(3, 3),
                     nn.MultiheadAttention(4, 2)):
        before = type(stranger)
        kinds(stranger)
        assert type(stranger) is before


def test_a_hook_of_the_module_itself_is_called():
    norm, seen = nn.LayerNorm(8), []
    norm.register_forward_hook(lambda m, args, out: seen.append(out))
    patch(norm)
    out = norm(torch.randn(2, 8))
    assert seen[0] is out


def test_layers_with_hooks_are_called():
    """Whether the hook was there before or comes later; and one for all modules."""
    early, late, seen = Gated(8), Gated(8), []
    early.a.register_forward_hook(lambda m, args, out: seen.append("early"))
    assert kinds(early) == {"linear": 3}
    assert kinds(late) == {"mlp": 1}
    x = torch.randn(2, 8)
    want = late(x)
    handle = late.a.register_forward_hook(lambda m, args, out: (seen.append("late"), out + 1)[1])
    early(x)
    assert not torch.allclose(late(x), want)
    handle.remove()
    assert late(x).equal(want)
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, args, out: seen.append(type(m).__name__))
    late(x)
    handle.remove()
    assert seen == ["early", "late", *["Linear"] * 3, "Gated"]


def test_a_layer_that_is_wrapped_later_is_not_forgotten():
    mlp, x = Gated(8), torch.randn(2, 8)
    assert kinds(mlp) == {"mlp": 1}
    mlp.out = Wrapping(mlp.out)
    torch.testing.assert_close(mlp(x), mlp.out(F.silu(mlp.a(x)) * mlp.b(x)))
    unpatch(mlp)
    assert kinds(mlp) == {"linear": 3}         # the layer inside the wrapper too
    assert not is_bare(mlp.out, nn.Linear)


def test_accelerate_hooks_before_and_after():
    hooks = pytest.importorskip("accelerate.hooks")
    norm = nn.LayerNorm(8)
    hooks.add_hook_to_module(norm, hooks.ModelHook())
    assert "accelerate" in why(norm)
    norm, x = nn.LayerNorm(8), torch.randn(2, 8)
    stock = norm(x)
    patch(norm)
    hooks.add_hook_to_module(norm, hooks.ModelHook())
    torch.testing.assert_close(norm(x), stock)
    unpatch(norm)
    assert norm._old_forward.__func__ is nn.LayerNorm.forward
    hooks.remove_hook_from_module(norm)
    assert norm(x).equal(stock) and type(norm) is nn.LayerNorm


def test_unusual_calls_are_as_they_were():
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    patch(norm), patch(linear)
    x = torch.randn(2, 8)
    assert norm(input=x).equal(norm(x))
    for args in ((), (x, x)):
        with pytest.raises(TypeError):
            linear(*args)
    with pytest.raises(RuntimeError, match="same dtype"):
        linear(x.double())
    with torch.inference_mode():
        assert norm(x).shape == x.shape
    assert str(linear) == str(nn.Linear(8, 8))
    assert type(linear).__name__ == "Linear" and isinstance(linear, nn.Linear)


def test_copies_and_pickles_are_patched_and_independent():
    model = Home()
    patch(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert kinds(twin) == {"rms_norm": 2, "mlp": 2, "layer_norm": 1, "linear": 1}
        assert patch(twin).changed == 0
        assert twin(IDS).equal(model(IDS))
        with torch.no_grad():
            twin.head.weight.zero_()
        assert not twin(IDS).any() and model(IDS).any()
        unpatch(twin)
        assert type(twin.last) is nn.LayerNorm and type(model.last) is not nn.LayerNorm


def test_a_transformers_model_is_copied_saved_and_loaded(tmp_path):
    model, model_inputs = tiny("llama"), inputs("llama")
    patch(model, only=KINDS)
    with torch.no_grad():
        ours = model(**model_inputs).logits
        twin = copy.deepcopy(model)
        assert twin(**model_inputs).logits.equal(ours)
        unpatch(twin)
        assert twin.config._attn_implementation != "layerzero" == model.config._attn_implementation
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert loaded.config._attn_implementation != "layerzero"
        assert recipe_of(loaded.model.norm) is None
        torch.testing.assert_close(loaded(**model_inputs).logits, ours, rtol=1e-4, atol=1e-4)


def test_a_pickled_model_is_patched_when_it_is_loaded():
    model, model_inputs = tiny("gpt2"), inputs("gpt2")
    patch(model)
    loaded = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert loaded(**model_inputs).logits.equal(model(**model_inputs).logits)
    assert unpatch(loaded) > 0 and loaded.config._attn_implementation == "sdpa"


def test_tied_weights_stay_tied():
    model = tiny("llama", tie_word_embeddings=True)
    patch(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        assert not model(**inputs("llama")).logits.any()


def test_replicas_compute_with_their_own_weights():
    """As DataParallel makes them."""
    norm = nn.LayerNorm(8)
    patch(norm)
    replica = norm._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(8), torch.ones(8)
    assert replica(torch.randn(2, 8)).equal(torch.ones(2, 8))
    parallel = nn.DataParallel(Home())
    assert kinds(parallel)["mlp"] == 2
    assert parallel(IDS).shape == (2, 5, 11)


def test_nothing_is_kept_of_a_model_that_is_gone():
    model = tiny("llama")

    class Norm(type(model.model.norm)):
        """Of this model alone: a patched class is shared with all models in this process."""

    model.model.norm.__class__ = Norm
    report = patch(model)
    model(**inputs("llama"))
    gone = [weakref.ref(part) for part in (model, model.model.norm, model.model.layers[0].mlp,
                                           model.config)]
    assert type(model.model.norm) is not Norm and issubclass(type(model.model.norm), Norm)
    made = weakref.ref(type(model.model.norm))
    del model, Norm
    collect_garbage()
    assert [ref() for ref in gone] == [None] * 4 and made() is None
    with pytest.raises(lz.errors.ConfigError, match="gone"):
        report.explain(**inputs("llama"))


def test_a_class_that_came_after_ours_is_reported():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    patch(model, only="linear")
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(lz.errors.ConfigError, match="parametrized"):
        unpatch(model)
    assert type(model[1]) is nn.Linear
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert unpatch(model) == 1 and type(model[0]) is nn.Linear


def test_what_is_wrong_is_said():
    with pytest.raises(lz.errors.ConfigError, match="Module, got dict"):
        patch({})
    with pytest.raises(lz.errors.ConfigError, match="rms_norm"):
        patch(Home(), only="rmsnorm")
    with pytest.raises(lz.errors.ConfigError,
                       match="no kind 'lm-head'"), patched(Home(), skip=("lm-head",)):
        pass
    assert kinds(Home(), only=("rms_norm", "mlp"), skip="mlp") == {"rms_norm": 2}


def test_fresh_weights_tell_enough():
    """A new model's norms are all ones and its biases zeros; some layers are zero altogether."""
    mlp = Gated(8)
    with torch.no_grad():
        for p in mlp.parameters():
            p.zero_()
    assert kinds(mlp) == {"mlp": 1} and not any(p.any() for p in mlp.parameters())
    assert all(p.grad is None for p in mlp.parameters())


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad,
                                    lambda: torch.autocast("cpu", torch.bfloat16),
                                    lambda: torch.device("meta")])
def test_whatever_is_in_force_around_it(around):
    model = Home()
    with around():
        assert kinds(model) == {"rms_norm": 2, "mlp": 2, "layer_norm": 1, "linear": 1}
    with torch.inference_mode():
        born = Gated(8)                        # of weights that can have no gradient
    assert kinds(born) == {"mlp": 1}


def test_a_default_dtype_is_not_the_dtype_of_a_trial():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert patch(tiny("llama"), only=("rope", "rms_norm", "mlp")).counts() == {
            "rope": 2, "rms_norm": 5, "mlp": 2}
    finally:
        torch.set_default_dtype(torch.float32)


def test_trying_out_leaves_no_trace():
    model, before = Home().train(), torch.get_rng_state()
    modes = [m.training for m in model.modules()]
    weights = dict(model.named_parameters())
    patch(model)
    assert torch.get_rng_state().equal(before)
    assert [m.training for m in model.modules()] == modes
    assert all(p is weights[n] and p.requires_grad for n, p in model.named_parameters())


class OwnAttention(nn.Module):
    """As one writes it by hand; `way` is how it gets at torch's attention."""

    def __init__(self, way):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 96), nn.Linear(64, 64)
        self.forward_way = way

    def heads(self, x):
        return [t.unflatten(-1, (-1, 16)).transpose(1, 2)
                for t in self.qkv(x).split((64, 16, 16), -1)]


class ByAlias(OwnAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out(F.scaled_dot_product_attention(q, k, v,
                                                       is_causal=True).transpose(1, 2).flatten(2))


class ByPath(OwnAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(seen.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [ByAlias, ByPath])
def test_a_forward_that_calls_torchs_attention_is_served(kind):
    torch.manual_seed(0)
    model, other, x = kind("F").eval(), kind("F").eval(), torch.randn(2, 7, 64)
    other.load_state_dict(model.state_dict())
    want = model(x)
    report = patch(model)
    assert report.counts()["attention"] == 1, report
    before = lz.stats().calls.get("attention", {})
    torch.testing.assert_close(model(x), want)
    # the function itself was not touched
    torch.testing.assert_close(other(x), want, rtol=0, atol=0)
    ran = lz.stats().calls["attention"]
    # one key head for four: torch broadcasts it
    assert sum(ran.values()) == sum(before.values()) + 1
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), want)
    unpatch(model)
    assert type(model) is kind and torch.equal(model(x), want)
