"""lz.auto(): pipelines and models of diffusers are patched as they are loaded."""

from __future__ import annotations

import pytest

diffusers = pytest.importorskip("diffusers")

import numpy as np  # noqa: E402
from diffusers import DDIMScheduler, DiffusionPipeline, UNet2DConditionModel  # noqa: E402
from tiny_pipelines import denoiser, image, pipeline  # noqa: E402

import layerzero as lz  # noqa: E402

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def off():
    yield
    lz.auto(False).unpatch()


def processors(unet) -> set[bool]:
    """Whether processors are ours."""
    return {"_layerzero_original" in vars(p) for p in unet.attn_processors.values()}


def test_a_pipeline_is_patched_as_a_whole(tmp_path):
    stock = pipeline("sd15")
    stock.save_pretrained(tmp_path)
    expected = image(stock, "sd15")
    with lz.auto() as auto:
        pipe = DiffusionPipeline.from_pretrained(tmp_path)
    entry, = auto.models                       # none for its parts
    assert entry.model is pipe and entry.report.count("attention")
    assert processors(pipe.unet) == {True}
    components = {name for name, _, _ in entry.report.replaced}
    assert {"unet", "vae", "text_encoder"} <= components
    pipe.set_progress_bar_config(disable=True)
    assert np.abs(image(pipe, "sd15") - expected).max() < 1e-3
    assert auto.unpatch() == 1 and processors(pipe.unet) == {False}
    assert np.array_equal(image(pipe, "sd15"), expected)       # to the last bit


def test_a_model_is_patched_and_a_scheduler_is_none(tmp_path):
    stock = denoiser(pipeline("sd15"))
    stock.save_pretrained(tmp_path)
    method = vars(diffusers.ModelMixin)["from_pretrained"]
    with lz.auto() as auto:
        loaded = UNet2DConditionModel.from_pretrained(tmp_path)
        unet = UNet2DConditionModel.from_config(stock.config)
        DDIMScheduler.from_config(DDIMScheduler().config)
        assert [entry.model for entry in auto.models] == [loaded, unet]
    assert processors(loaded) == processors(unet) == {True} and processors(stock) == {False}
    assert vars(diffusers.ModelMixin)["from_pretrained"] is method
