"""Weights of an accelerated model lie side by side in memory, and nobody but the decode step can
tell.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re

import models
import pytest
import torch
from models import tiny, tokens
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from layerzero.integrations.transformers.accelerate import accelerate, unaccelerate
from layerzero.integrations.transformers.decoding.accelerated import MOVED
from layerzero.integrations.transformers.decoding.joined import Joined

pytestmark = pytest.mark.integration
FAMILIES = ("llama", "gpt2", "opt", "mixtral")
OPT = ("OPTForCausalLM", "OPTConfig", {
    "vocab_size": models.VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})


@pytest.fixture(autouse=True)
def opt(monkeypatch):
    """Known to `tiny` here only: other files make a test of every family there is."""
    monkeypatch.setitem(models.FAMILIES, "opt", OPT)


@pytest.fixture(params=FAMILIES)
def pair(request):
    """A model and the same one accelerated."""
    model = tiny(request.param)
    accelerate(model, measure=False, patch=False)
    return tiny(request.param), model


@torch.no_grad()
def decode(model, seed: int = 1):
    ids = tokens(1, 9, seed=seed)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    return torch.cat([model(ids[:, i:i + 1], past_key_values=cache).logits for i in range(6, 9)])


def agree(model, stock):
    want = decode(stock)
    torch.testing.assert_close(decode(model), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def file_of(value) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def test_the_weights_are_side_by_side():
    model = tiny("llama")
    size = sum(p.nbytes for p in model.parameters())
    report = accelerate(model, measure=False)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
    for parts in ((attention.q_proj, attention.k_proj, attention.v_proj),
                  (mlp.gate_proj, mlp.up_proj)):
        for first, second in itertools.pairwise(parts):
            assert second.weight.data_ptr() == first.weight.data_ptr() + first.weight.nbytes
    # no second copy is kept
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == size
    report.undo()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_every_tensor_is_laid_out_as_on_the_stock_model(pair):
    stock, model = pair
    ours, want = model.state_dict(), stock.state_dict()
    assert list(ours) == list(want)
    for name, tensor in want.items():
        got = ours[name]
        assert (got.equal(tensor) and got.stride() == tensor.stride()
                and got.is_contiguous() == tensor.is_contiguous())
        assert (got.storage_offset() == 0
                and got.untyped_storage().nbytes() == tensor.untyped_storage().nbytes())
        assert file_of({"only": got}) == file_of({"only": tensor})
    assert [(n, type(p), p.requires_grad, p.is_leaf) for n, p in model.named_parameters()] == [
        (n, type(p), p.requires_grad, p.is_leaf) for n, p in stock.named_parameters()]
    assert file_of(ours) == file_of(want)


def test_safetensors(pair, tmp_path):
    stock, model = pair
    tied = stock.lm_head.weight is stock.get_input_embeddings().weight
    if not tied:                               # save_file refuses those of a stock model too
        save_file(model.state_dict(), tmp_path / "file.safetensors")
        assert all(t.equal(stock.state_dict()[n])
                   for n, t in load_file(tmp_path / "file.safetensors").items())
    save_model(model, str(tmp_path / "model.safetensors"))
    save_model(stock, str(tmp_path / "stock.safetensors"))
    ours, want = (load_file(tmp_path / f"{name}.safetensors") for name in ("model", "stock"))
    assert ours.keys() == want.keys() and all(ours[n].equal(t) for n, t in want.items())
    for p in model.parameters():
        p.data.zero_()
    load_model(model, str(tmp_path / "stock.safetensors"))
    agree(model, stock)


@pytest.mark.parametrize("again", (
    copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)),
    lambda m: torch.load(io.BytesIO(saved(m)), weights_only=False)),
                         ids=("deepcopy", "pickle", "torch.save"))
def test_a_copy_is_a_stock_model(again, pair):
    stock, model = pair
    try:
        again(stock)
    # rope functions of transformers are no longer found by their names
    except AttributeError as refused:
        with pytest.raises(AttributeError, match=re.escape(str(refused))):
            again(model)
        return
    twin = again(model)
    assert vars(twin).keys() == vars(stock).keys() and type(twin) is type(stock)
    assert not unaccelerate(twin) and unaccelerate(model)
    for (name, got), want in zip(twin.named_parameters(), stock.parameters()):
        assert (got.equal(want)
                and got.untyped_storage().nbytes() == want.untyped_storage().nbytes()), name
    assert decode(twin).equal(decode(stock))


def saved(model) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def test_the_forward_and_the_report_are_copied_too():
    model = tiny("opt")
    accelerate(model, measure=False)
    for forward in (copy.deepcopy(model.forward), pickle.loads(pickle.dumps(model.forward))):
        assert forward.__func__ is type(forward.__self__).forward and forward.__self__ is not model


@pytest.mark.parametrize("how", (prune.l1_unstructured, prune.random_unstructured))
def test_pruning(pair, how):
    for model in pair:
        torch.manual_seed(0)
        for module in [m for m in model.modules() if isinstance(m, nn.Linear)][:4]:
            how(module, "weight", amount=0.5)
    agree(pair[1], pair[0])
    for model in pair:
        for module in [m for m in model.modules() if hasattr(m, "weight_orig")]:
            prune.remove(module, "weight")
    agree(pair[1], pair[0])
    assert list(pair[0].state_dict()) == list(pair[1].state_dict())


def test_vectors(pair):
    stock, model = pair
    vector = parameters_to_vector(model.parameters())
    assert vector.equal(parameters_to_vector(stock.parameters()))
    for one in pair:
        vector_to_parameters(vector.detach() * 0.9, one.parameters())
    agree(model, stock)
    unaccelerate(model)
    agree(model, stock)
    # views of the vector
    assert {p.untyped_storage().nbytes() for p in model.parameters()} == {vector.nbytes}


@pytest.mark.parametrize("make", (
    lambda p: torch.optim.SGD(p, lr=0.05), lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)), ids=("SGD", "foreach", "fused"))
def test_an_optimizer_trains_what_the_step_reads(pair, make):
    for model in pair:
        optimizer = make(model.parameters())
        for seed in range(2):
            optimizer.zero_grad()
            ids = tokens(2, 8, seed=seed)
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    agree(pair[1], pair[0])
    report = vars(pair[1])["_layerzero_acceleration"]
    assert not report.declined and report.served["step"] >= 3


def test_weights_written_by_their_data_are_read(pair):
    with torch.no_grad():
        for model in pair:
            for p in model.parameters():
                p.data.mul_(0.9)
    agree(pair[1], pair[0])
    assert not vars(pair[1])["_layerzero_acceleration"].declined


@pytest.mark.parametrize("assign", (False, True))
def test_load_state_dict(pair, assign):
    stock, model = pair
    other = {n: t * 0.9 for n, t in stock.state_dict().items()}
    for one in pair:
        one.load_state_dict(copy.deepcopy(other), assign=assign)
    agree(model, stock)
    assert bool(vars(model)["_layerzero_acceleration"].declined) is assign
    unaccelerate(model)
    agree(model, stock)


def test_a_wrapper_that_keeps_the_weights_in_one_flat_tensor(pair):
    """As FSDP does: each parameter becomes a view of it, and is updated by writing to it; undoing
    leaves that alone."""
    flats = []
    for model in pair:
        flat = parameters_to_vector(model.parameters()).detach().clone()
        vector_to_parameters(flat, model.parameters())
        flats.append(flat)
    report = vars(pair[1])["_layerzero_acceleration"]
    agree(pair[1], pair[0])
    # and what was joined is given up
    assert report.declined == {MOVED: 3} and not report._step.layers
    assert unaccelerate(pair[1])
    for flat in flats:
        flat.mul_(0.9)
    agree(pair[1], pair[0])
    report = accelerate(pair[1], measure=False, patch=False)
    if any(len(group) > 1 for group in groups(pair[1])):
        assert "shares its memory with another tensor" in str(report)
    for flat in flats:
        flat.mul_(0.9)
    agree(pair[1], pair[0])


def groups(model):
    from layerzero.integrations.transformers.decoders.recognition import recognise

    return [layer.qkv for layer in recognise(model).layers]


def tie_by_memory(model):
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight.data = first.q_proj.weight.data


def tie_by_object(model):
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj = first.q_proj


def strided(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize("change, why", [
    (tie_by_memory, "shares its memory"), (tie_by_object, "shares its memory"),
    (strided, "its strides are"), (lambda m: m.share_memory(), "shared with other processes")])
def test_weights_that_must_stay_where_they_are(change, why):
    model = tiny("llama")
    change(model)
    places = [p.data_ptr() for p in model.parameters()]
    report = accelerate(model, measure=False, patch=False)
    assert why in str(report) and not report.done
    assert [p.data_ptr() for p in model.parameters()] == places


def test_undone_in_inference_mode():
    model, ids = tiny("llama"), tokens(2, 8)
    report = accelerate(model, measure=False)
    with torch.inference_mode():
        report.undo()
    assert not any(p.is_inference() for p in model.parameters())
    model(ids, labels=ids).loss.backward()
    model = tiny("llama")
    accelerate(model, measure=False, patch=False)
    for p in model.model.layers[0].parameters():
        p.data = p.data.clone()
    with torch.inference_mode():
        decode(model)                         # which gives up what was joined
    assert not any(p.is_inference() for p in model.parameters())


def test_shared_with_other_processes_later():
    model, stock = tiny("llama"), tiny("llama")
    report = accelerate(model, measure=False, patch=False)
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    agree(model, stock)
    assert (MOVED in report.declined and unaccelerate(model)
            and all(p.is_shared() for p in model.parameters()))


def test_a_model_from_a_file_is_joined(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    model = type(tiny("llama")).from_pretrained(tmp_path)
    assert accelerate(model, measure=False).kernels


def test_an_error_between_weights_and_biases(monkeypatch):
    model = tiny("qwen2")
    layer = model.model.layers[0].self_attn
    values = [p.clone() for p in layer.parameters()]
    join, joined = Joined._join, []

    def fault(self, parameters):
        if parameters[0].dim() == 1:
            raise MemoryError
        joined.extend(parameters)
        return join(self, parameters)

    monkeypatch.setattr(Joined, "_join", fault)
    report = accelerate(model, measure=False)
    assert not report.done and joined[0] is layer.q_proj.weight
    # each has memory of its own again
    assert joined[1].data_ptr() != joined[0].data_ptr() + joined[0].nbytes
    assert all(p.equal(v) and p.untyped_storage().nbytes() == p.nbytes
               for p, v in zip(layer.parameters(), values))
