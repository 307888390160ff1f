"""An attention backend of diffusers that the user chose stays, and an error while patching leaves
nothing patched.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("diffusers", "0.36")
from diffusers.models import attention_dispatch
from tiny_pipelines import denoiser, denoiser_inputs, pipeline

from layerzero.integrations import diffusers as home
from layerzero.integrations.diffusers import patch_diffusers, patched_diffusers, unpatch_diffusers

pytestmark = pytest.mark.integration
NAMES, REGISTRY = (attention_dispatch.AttentionBackendName,
                   attention_dispatch._AttentionBackendRegistry)


@pytest.fixture(autouse=True)
def active():
    """set_attention_backend of diffusers sets its global default, too."""
    before = REGISTRY.get_active_backend()[0]
    yield
    REGISTRY.set_active_backend(before)


@torch.no_grad()
def run(model: nn.Module, name: str) -> torch.Tensor:
    return model(**denoiser_inputs(name))[0]


def test_a_backend_that_was_set_stays():
    model = denoiser(pipeline("flux"))
    model.set_attention_backend("_native_math")
    REGISTRY.set_active_backend(NAMES.NATIVE)
    processors, stock = list(model.attn_processors.values()), run(model, "flux")
    report = patch_diffusers(model)
    assert (not report.count("attention") and "'_native_math' was chosen" in str(report)
            and report.count("linear"))
    assert all(a is b for a, b in zip(processors, model.attn_processors.values()))
    torch.testing.assert_close(run(model, "flux"), stock, rtol=1e-4, atol=1e-4)
    model.set_attention_backend("native")
    assert patch_diffusers(model).count("attention") == len(processors)


def test_a_backend_for_all_models_stays():
    model = denoiser(pipeline("flux"))
    with attention_dispatch.attention_backend("_native_math"):
        report = patch_diffusers(model)
    assert not report.count("attention") and "'_native_math' was chosen" in str(report)


def test_another_function_registered_for_the_default_stays(monkeypatch):
    own = REGISTRY._backends[NAMES.NATIVE]
    monkeypatch.setitem(REGISTRY._backends, NAMES.NATIVE,
                        lambda *args, **kwargs: own(*args, **kwargs) / 2)
    assert "'native' was chosen" in str(patch_diffusers(denoiser(pipeline("flux"))))


@pytest.mark.parametrize("name", ("sd15", "flux"))
def test_another_function_in_the_place_of_torchs_stays(name, monkeypatch):
    model, own = denoiser(pipeline(name)), F.scaled_dot_product_attention

    def half(*args, **kwargs):
        return own(*args, **kwargs) / 2

    for patched_first in (False, True):
        with monkeypatch.context() as there:
            there.setattr(F, "scaled_dot_product_attention", half)
            stock = run(model, name)
            report = patch_diffusers(model)
            assert bool(report.count("attention")) is patched_first, report
            if not patched_first:
                assert "scaled_dot_product_attention is" in str(report)
            # set after the patch: that is the latest choice
            if not patched_first or name == "sd15":
                torch.testing.assert_close(run(model, name), stock, rtol=1e-4, atol=1e-4)
        unpatch_diffusers(model)
        patch_diffusers(model)
    assert patch_diffusers(model).count("attention")


def test_a_backend_that_is_set_later_outlives_the_patch():
    model = denoiser(pipeline("flux"))
    patch_diffusers(model)
    model.set_attention_backend("_native_math")
    unpatch_diffusers(model)
    assert {p._attention_backend for p in model.attn_processors.values()} == {NAMES._NATIVE_MATH}


def state(model: nn.Module) -> list:
    return [(type(m), getattr(m, "processor", None)) for m in model.modules()]


@pytest.mark.parametrize("place", ("_replace_class", "_replace_linear", "_replace_processor"))
@pytest.mark.parametrize("name", ("sd15", "flux"))
def test_an_error_leaves_nothing_patched(name, place, monkeypatch):
    model, calls, own = denoiser(pipeline(name)), [], getattr(home, place)
    before = state(model)

    def fault(*args):
        calls.append(args)
        if len(calls) == (1 if place == "_replace_linear" else 2):
            raise RuntimeError("in the middle of it")
        return own(*args)

    monkeypatch.setattr(home, place, fault)
    with pytest.raises(RuntimeError, match="middle"):
        patch_diffusers(model)
    assert state(model) == before


def test_a_block_leaves_what_was_patched_before_it():
    model = denoiser(pipeline("flux"))
    patch_diffusers(model, parts="attention")
    before = state(model)
    with patched_diffusers(model) as report:
        assert report.count("linear") and state(model) != before
    assert state(model) == before
    unpatch_diffusers(model)
