"""Other layers that choose a kernel, as they are called in practice, each beside its own target.

A layer's target is what it would call in the end, called by hand: what the layer adds is the
difference. Where a layer wants another layout, its target does that work too.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from timing import Contestant
from torch import Tensor

# What a library that does not fit this torch or this Python raises while it is set up.
ERRORS = (AttributeError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError,
          ValueError)


@dataclass(frozen=True)
class Tiny:
    """The call that everyone serves."""

    device: str
    qkv: Mapping[str, Tensor]                  # (batch, heads, seq, dim)
    result: Tensor
    kernel: str                                # torch's name of the function called by hand, as `f`
    by_hand: str                               # the call: an expression over f, q, k, v
    direct: str                                # the name of the contestant that is that call


def versions() -> dict[str, str]:
    found = {}
    for name in PEERS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def contestants(tiny: Tiny, keep: contextlib.ExitStack) -> tuple[list[Contestant], dict[str, str]]:
    """The peers that are here, and for the others why they are not. `keep` outlives the race."""
    found: list[Contestant] = []
    missing: dict[str, str] = {}
    here = versions()
    for name, build in PEERS.items():
        if name not in here:
            missing[name] = "not installed"
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):    # one of them prints
                found += build(tiny, keep)
        except ImportError as e:
            missing[name] = f"does not import: {e}"
        except ERRORS as e:
            missing[name] = f"could not be set up: {type(e).__name__}: {e}"
    return found, missing


def _transformers(tiny: Tiny, keep: contextlib.ExitStack) -> Iterator[Contestant]:
    """As a model calls it. It gives (batch, seq, heads, dim) back, in one piece."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = torch.nn.Module()
    module.__dict__.update(is_causal=False, num_key_value_groups=1)
    target, back = "transformers' target by hand", tiny.result.transpose(1, 2)
    yield Contestant(target, "out = f(q, k, v).transpose(1, 2).contiguous()",
                     {**tiny.qkv, "f": F.scaled_dot_product_attention}, tiny.direct, back)
    yield Contestant("transformers attention interface",
                     "out = get('sdpa', other)(module, q, k, v, None, dropout=0.0, "
                     "scaling=scale)[0]",
                     {**tiny.qkv, "get": ALL_ATTENTION_FUNCTIONS.get_interface,
                      "other": sdpa_attention_forward,
                      "module": module, "scale": tiny.result.shape[-1] ** -0.5}, target, back)


def _diffusers(tiny: Tiny, keep: contextlib.ExitStack) -> Iterator[Contestant]:
    """Its layout is (batch, seq, heads, dim), in and out."""
    from diffusers.models import attention_dispatch as theirs

    native = theirs._AttentionBackendRegistry._backends[theirs.AttentionBackendName.NATIVE]
    scope = {n: t.transpose(1, 2).contiguous() for n, t in tiny.qkv.items()}
    target, back = "diffusers' native target", tiny.result.transpose(1, 2)
    yield Contestant(target, "out = f(q, k, v)", {**scope, "f": native}, tiny.direct, back)
    yield Contestant("diffusers dispatch_attention_fn", "out = f(q, k, v)",
                     {**scope, "f": theirs.dispatch_attention_fn}, target, back)


def _flashinfer_bench(tiny: Tiny, keep: contextlib.ExitStack) -> Iterator[Contestant]:
    """A trace set of one definition with one solution in Python, which won for this very shape: a
    hit."""
    os.environ["FIB_CACHE_PATH"] = keep.enter_context(tempfile.TemporaryDirectory())
    import flashinfer_bench as theirs  # type: ignore[import-untyped, import-not-found]
    from flashinfer_bench.apply import ApplyRuntime  # type: ignore[import-untyped, import-not-found]
    from flashinfer_bench.integration.patch_manager import get_manager  # type: ignore[import-untyped, import-not-found]

    code = (f"import torch\n\nf = torch.{tiny.kernel}\n\n\ndef run(q, k, v):\n    return "
            f"{tiny.by_hand}\n")
    batch, heads, seq, dim = tiny.result.shape
    axes = {"b": theirs.AxisVar(), "h": theirs.AxisVar(), "s": theirs.AxisVar(),
            "d": theirs.AxisConst(value=dim)}
    spec = theirs.TensorSpec(shape=list(axes), dtype=str(tiny.result.dtype).removeprefix("torch."))
    definition = theirs.Definition(name="tiny", op_type="attention", axes=axes,
                                   inputs=dict.fromkeys(tiny.qkv, spec),
                                   outputs={"out": spec}, reference=code)
    solution = theirs.Solution(
        name="tiny_python", definition="tiny", author="benchmark",
        sources=[theirs.SourceFile(path="main.py", content=code)],
        spec=theirs.BuildSpec(language="python", target_hardware=[tiny.device],
                              entry_point="main.py::run",
                              destination_passing_style=False))
    workload = theirs.Workload(axes={"b": batch, "h": heads, "s": seq}, uuid="tiny",
                               inputs={n: theirs.RandomInput() for n in tiny.qkv})
    evaluation = theirs.Evaluation(
        status="PASSED", environment=theirs.Environment(hardware=tiny.device),
        timestamp="2000-01-01T00:00:00", correctness=theirs.Correctness(),
        performance=theirs.Performance(latency_ms=1.0, reference_latency_ms=2.0,
                                       speedup_factor=2.0))
    trace = theirs.Trace(definition="tiny", solution="tiny_python", workload=workload,
                         evaluation=evaluation)
    runtime = ApplyRuntime(theirs.TraceSet(definitions={"tiny": definition},
                                           solutions={"tiny": [solution]},
                                           traces={"tiny": [trace]}), theirs.ApplyConfig())
    # it replaces functions of torch: that is not what is measured here
    get_manager().unpatch_all()
    made: dict[str, object] = {}
    exec(code, made)
    target = "flashinfer-bench's target"
    yield Contestant(target, "out = f(q, k, v)", {**tiny.qkv, "f": made["run"]}, tiny.direct,
                     tiny.result)
    # Without a fallback a miss raises, so what is timed is a hit.
    yield Contestant("flashinfer-bench apply, hit", "out = f('tiny', args=(q, k, v))",
                     {**tiny.qkv, "f": theirs.apply}, target, tiny.result, around=lambda: runtime)


Builder = Callable[[Tiny, contextlib.ExitStack], Iterator[Contestant]]
PEERS: Mapping[str, Builder] = {
    "transformers": _transformers, "diffusers": _diffusers, "flashinfer-bench": _flashinfer_bench}
