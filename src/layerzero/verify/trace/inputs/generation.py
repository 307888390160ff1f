"""Inputs for a definition that make sense: offsets that add up, pages that exist, probabilities
that are some.

What an input means is told by its name, shape and dtype. A workload's own sizes are kept; sizes
that nobody chose come from "small", "medium" or "large". Weights of many experts are overlapping
windows of one buffer: every expert is different, and all of them fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....spec.errors import DataError
from ..dataset import dataset_root, inside
from ..definition import Definition, ScalarInput, StoredInput, TensorSpec, Workload
from ..exports import case_inputs
from ..readings import skips, small_numbers
from . import drawn as kinds
from .constraints import solved, violated
from .sequences import LENGTHS, QUERY, SIZES, Plan, Sequences

# bytes from which the experts of a weight share their storage
LARGE = 1 << 28
MAX_CHOSEN = 4096                              # tokens that a query of sparse attention sees
# a prime: random numbers may repeat, rows of a tensor shall not
PERIOD = 4194301
_FREE = {"num_qo_heads": 4, "num_q_heads": 4, "num_heads": 4, "num_kv_heads": 2, "num_k_heads": 2,
         "head_size": 64, "head_dim": 64, "max_seq_len": 128, "max_position": 128,
         "vocab_size": 1000}
_CHOSEN, _STATES = re.compile(r"(indices|ids)$"), re.compile(r"state.*(ind|idx)", re.IGNORECASE)


def generate(definition: Definition, size: str = "small", axes: Mapping[str, int] | None = None,
             seed: int = 0, device: str = "cpu",
             workload: Workload | None = None) -> dict[str, Any]:
    """Generate every input; `axes` fixes some variable axes, a workload fixes all."""
    if size not in SIZES:
        raise DataError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    own = definition.tag("lz_case")
    if own and workload is None and not axes:
        return case_inputs(definition, seed, device)
    fixed_axes = {**(workload.axes if workload else {}), **(axes or {})}
    unknown = [name for name in fixed_axes if name not in definition.var_axes]
    if unknown:
        raise DataError(f"{definition.name} has no variable axis {unknown[0]!r}; it has "
                        f"{', '.join(definition.var_axes) or 'none'}")
    maker = _Maker(definition, SIZES[size], fixed_axes, torch.Generator().manual_seed(seed))
    inputs = maker.make()
    if workload is not None:
        inputs |= _workload_inputs(definition, workload)
    broken = violated(definition.constraints, {**maker.sizes, **definition.const_axes, **inputs})
    if broken:
        raise DataError(
            f"{definition.name}: no inputs were found that keep {broken[0]!r}; the axes are "
            f"{maker.sizes}")
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in inputs.items()}


def _workload_inputs(definition: Definition, workload: Workload) -> dict[str, Any]:
    """Return the inputs that the workload gives; a missing tensor file is generated."""
    inputs: dict[str, Any] = {n: spec.value for n, spec in workload.inputs.items()
                              if isinstance(spec, ScalarInput)}
    root = dataset_root(definition)
    for name, spec in workload.inputs.items():
        if (isinstance(spec, StoredInput) and root is not None
            and (path := inside(root, spec.path)).is_file()):
            inputs[name] = _stored(path, spec.key)
    return inputs


def _stored(path: Path, key: str) -> Tensor:
    try:
        from safetensors.torch import load_file
    except ImportError as e:
        raise DataError(
            f"{path}: reading it needs the package safetensors; pip install safetensors") from e
    tensors: dict[str, Tensor] = load_file(str(path))
    if key not in tensors:
        raise DataError(f"{path}: has no tensor {key!r}; it has {', '.join(tensors)}")
    return tensors[key]


class _Maker(Sequences):
    """One set of inputs in the making: first the sizes, then the values."""

    def make(self) -> dict[str, Any]:
        plan = self.plan() if self.indptrs or self.table else None
        self._solve()
        for axis in self.d.var_axes:
            self.sizes.setdefault(axis, _FREE.get(axis, self._pool(axis) or self.size.rows))
        self._solve()
        self._refuse_huge()
        return kinds.between_tokens({name: self._value(name, spec, plan)
                                     for name, spec in self.d.inputs.items()})

    def _pool(self, axis: str) -> int:
        """Size of what an index points into: states of which one is unused, tokens of which more
        exist than a query chooses. 0 for another axis."""
        chosen = next((self.const.get((s.shape or ("",))[-1], 0) for n, s in self.ints.items()
                       if _CHOSEN.search(n) and n != self.table and len(s.shape or ()) == 2), 0)
        if chosen and axis == self.pool_axis():
            return max(kinds.pool_for(min(chosen, MAX_CHOSEN), self.page_size), self.size.rows)
        states = any(_STATES.search(n) for n in self.ints) and any(
            s.shape and s.shape[0] == axis and "state" in n.lower() and s.floating
            and "buffer" not in n.lower() for n, s in self.d.inputs.items())
        return self.size.rows + 1 if states and "batch" not in axis else 0

    def _solve(self) -> None:
        free = [a for a in self.d.var_axes if a not in self.sizes]
        self.sizes |= solved(self.d.constraints, free, {**self.const, **self.sizes})

    def _refuse_huge(self) -> None:
        """Raises DataError for inputs that do not fit, before any of them is made."""
        free = available_memory()
        taken, largest, name = 0, 0, ""
        for n, spec in self.d.inputs.items():
            shape = self.d.shape_of(spec, self.sizes)
            size = 4 * math.prod(shape)        # drawn in float32
            if len(shape) > 2 and all(a in self.const for a in spec.shape or ()) and size > LARGE:
                size = 4 * (math.prod(shape[1:]) + shape[0] * shape[-1])     # one buffer for all
            taken += size
            largest, name = max((largest, name), (size, n))
        if free and taken > free // 2:
            raise DataError(
                f"{self.d.name}: its inputs take {taken / 2**30:.1f} GiB, {name} alone "
                f"{largest / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free, of which half "
                "may be used; choose smaller axes")

    # values

    def _value(self, name: str, spec: TensorSpec, plan: Plan | None) -> Any:
        if spec.shape is None:
            return self._scalar(name, spec)
        shape = self.d.shape_of(spec, self.sizes)
        if spec.floating:
            return self._floats(name, spec, shape)
        if spec.dtype == "bool":
            return torch.rand(shape, generator=self.gen) < 0.5
        return self._integers(name, spec, shape, plan).to(getattr(torch, spec.dtype))

    def _scalar(self, name: str, spec: TensorSpec) -> Any:
        low = name.lower()
        if spec.dtype == "bool":
            return True
        if not spec.floating:
            if "offset" in low:
                return self._first_expert()
            return {"window_left": 7,
                    "top_k": self.const.get("top_k", 2)}.get(low, self.const.get(low, 1))
        if "eps" in low:
            return 1e-6
        if re.search(r"(^|_)[kv]_?scale", low):
            return 0.75 if "k" in low else 1.25
        if "routed_scaling" in low:
            return 2.5
        if "cap" in low or "theta" in low:
            return 5.0 if "cap" in low else 1e4        # a cap that logits come near to
        if "scale" in low and not re.search(r"(^|_)[kv]_?scale", low):
            dims = [self.d.shape_of(s, self.sizes)[-1] for n, s in self.d.inputs.items()
                    if s.floating and s.shape and QUERY.search(n)]
            # no default, and no other scale: it must be read
            return 0.9 * self._place(name) / math.sqrt(sum(dims) or 1)
        return {"top_p": 0.8, "min_p": 0.05, "temperature": 0.7}.get(low, 1.5 * self._place(name))

    def _first_expert(self) -> int:
        """The first expert that this device has, not the first of all where it has not all."""
        local = self.const.get("num_local_experts", 0)
        return min(local, max(self.const.get("num_experts", 0) - local, 0))

    def _place(self, name: str) -> float:
        """A factor that tells a scalar from those before it: 1, 1.4, 1.8."""
        scalars = [n for n, s in self.d.inputs.items() if s.shape is None and s.floating]
        return 1.0 + 0.4 * scalars.index(name)

    def _floats(self, name: str, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        low, dtype = name.lower(), spec.dtype
        if dtype == "float4_e2m1":
            raise DataError(
                f"{self.d.name}: {name} is {dtype}, for which torch has no arithmetic; its codes "
                "must come from a stored workload")
        if low == "probs" or low.endswith("_probs"):
            probs = (self._random(shape) * 2).softmax(-1)
            if probs.shape[-1] > 1 and probs.numel():
                probs[-1:, ..., 0] = 0.0       # a token that was never written is 0
            return kinds.with_peaks(probs / probs.sum(-1, keepdim=True))
        if "top_p" in low:
            least = 0.0 if kinds.guards_zero(self.d) else 1e-6
            return self._rows(shape, (0.3, 0.97, kinds.NUCLEUS, 1.0, least))
        if re.match("uniforms?(_|$)", low):
            return torch.rand(shape, generator=self.gen)
        if "min_p" in low or "temperature" in low:
            return self._rows(shape, (0.1, 0.5, 0.02))
        if "cos_sin" in low or low in ("cos", "sin", "cos_cache", "sin_cache"):
            return kinds.angles(low, shape).to(getattr(torch, dtype))
        if "logits" in low:
            drawn = self._distinct(shape, getattr(torch, dtype).itemsize < 4)
            if len(shape) > 1 and "sigmoid" in self.d.reference:
                drawn[-1:] -= 16.0             # scores beside which what is added to a sum shows
            return drawn.to(getattr(torch, dtype))
        if "scale" in low:
            return (torch.rand(shape, generator=self.gen) + 0.5) * self._unit(low)
        delta = re.match(r"gdn|.*delta_", self.d.op_type.lower())
        if delta and low in ("k", "key"):      # longer keys make the state grow without end
            unit = torch.nn.functional.normalize(self._random(shape), dim=-1)
            return (unit * (0.6 + 0.4 * torch.rand(shape[:-1], generator=self.gen))[..., None]).to(
                getattr(torch, dtype))         # none of length one: a kernel may make them so
        if low == "a" and re.match(r".*(mamba|ssu|selective_state)", self.d.op_type.lower()):
            # below zero, as a decay is
            return -torch.rand(shape, generator=self.gen).to(getattr(torch, dtype)) - 0.1
        if low == "a_log":                     # a decay that leaves something of the state
            return torch.rand(shape, generator=self.gen) * 2 - 2.5
        if len(shape) == 1:
            return self._vector(low, shape[0]).to(getattr(torch, dtype))
        fixed = all(axis in self.const for axis in spec.shape or ())
        # of the inputs of a sum; what is added to a result or multiplies it is not
        summed = fixed and not dtype.startswith("float8") and low != "d" and "bias" not in low
        by = 1 / math.sqrt(max(shape[-1], 1)) if summed else 1.0
        if "topk_weights" in low or "routing_weights" in low:
            return torch.rand(shape, generator=self.gen).to(getattr(torch, dtype))
        if QUERY.search(low):
            by *= kinds.towards_cap(self.d)
        drawn = self._weight(shape, getattr(torch, dtype), by, fixed)
        if not fixed and "norm" in self.d.op_type.lower() and len(shape) > 1:
            # a mean that is not zero: RMSNorm does not subtract it
            drawn = (drawn + 0.3) * self._magnitudes(shape[0]).view(-1, *[1] * (len(shape) - 1))
        if re.match(r"gemm|matmul|linear$", self.d.op_type.lower()):
            drawn = self._drifting(spec, drawn.float(), by, fixed)
        return drawn.to(getattr(torch, dtype))

    def _drifting(self, spec: TensorSpec, drawn: Tensor, by: float, fixed: bool) -> Tensor:
        """Return a matrix of a product, with what makes the sums of a row drift."""
        shapes = [s.shape for s in self.d.inputs.values() if s.floating and len(s.shape or ()) == 2]
        shared = [a for a in spec.shape or () if a in self.const
                  and sum(a in (shape or ()) for shape in shapes) == 2]
        if len(shapes) < 2 or len(shared) != 1 or drawn.dim() != 2:
            return drawn
        along = (spec.shape or ()).index(shared[0])
        rows = drawn if along else drawn.T
        (kinds.drift_weights(rows, by) if fixed else kinds.drift_rows(rows))
        return drawn

    def _vector(self, low: str, n: int) -> Tensor:
        if re.fullmatch(r"(routing|correction|e_score_correction)_?bias", low):
            local, first = self.const.get("num_local_experts", n), self._first_expert()
            bias = kinds.favour(kinds.below_zero(n, self.gen), first, local)
            return kinds.bias_in_groups(bias, kinds.groups(self.d), first)
        if "bias" in low:
            return kinds.apart(n, self.gen)
        if low == "d" or re.search(r"weight|gamma", low) or "norm" in self.d.op_type.lower():
            return kinds.signed((n,), self.gen)
        return torch.rand(n, generator=self.gen) + 0.5

    def _magnitudes(self, rows: int) -> Tensor:
        """Draw the magnitude of each row of a norm; some have a mean square near epsilon."""
        small = math.sqrt(next(iter(small_numbers(self.d)), 1e-6))
        return self._rows((rows,), (1.0, small, 8.0, 4 * small, 0.25))

    def _unit(self, low: str) -> float:
        """What keeps results near 1: the scale of a weight undoes the sum over its inputs."""
        base = next((n for n in self.d.inputs if low.startswith(n.lower()) and n.lower() != low),
                    "")
        number = re.search(r"\d", low)
        if not base and number and re.match(r"output", low):
            base = next((n for n in self.d.inputs if number[0] in n and "weight" in n
                         and "scale" not in n), "")
        spec = self.d.inputs.get(base)
        if spec is None or not spec.shape or any(axis not in self.const for axis in spec.shape):
            return 1.0
        return 1 / math.sqrt(max(self.const[spec.shape[-1]], 1))

    def _weight(self, shape: tuple[int, ...], dtype: torch.dtype, by: float, fixed: bool) -> Tensor:
        if not fixed or len(shape) < 3 or math.prod(shape) * dtype.itemsize < LARGE:
            return (self._random(shape) * by).to(dtype)
        count, rows, width = shape[0], math.prod(shape[1:-1]), shape[-1]
        buffer = (self._random((rows + count, width)) * by).to(dtype)
        return buffer.as_strided((count, rows, width), (width, width, 1)).unflatten(1, shape[1:-1])

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        n = math.prod(shape)
        if n <= PERIOD:
            return torch.randn(shape, generator=self.gen)
        return torch.randn(PERIOD, generator=self.gen).repeat(-(-n // PERIOD))[:n].view(shape)

    def _distinct(self, shape: tuple[int, ...], narrow: bool) -> Tensor:
        """Rows without equal values, also when rounded: the order of equals is undefined. 16 bits
        have too few values for a vocabulary, then the largest differ and the others are small."""
        reach = max(3.0, shape[-1] * 0.01)
        line = torch.linspace(-reach, reach, shape[-1])
        if narrow and shape[-1] > 1024:
            line = torch.linspace(-16.0, -4.0, shape[-1])
            line[-64:] = torch.arange(1, 65) / 16
        rows = [line[torch.randperm(shape[-1], generator=self.gen)]
                for _ in range(math.prod(shape[:-1]))]
        for row, column in zip(rows, (-1, 0)):   # the last and the first come to be chosen too
            top = int(row.argmax())
            row[[top, column]] = row[[column, top]]
        for row, parts in zip(rows[2:], (4, 8)):
            kinds.apart_in_groups(row, parts)
        return torch.stack(rows).view(shape) if rows else torch.empty(shape)

    def _rows(self, shape: tuple[int, ...], values: tuple[float, ...]) -> Tensor:
        return torch.tensor([values[i % len(values)] for i in range(math.prod(shape))]).view(shape)

    def _integers(self, name: str, spec: TensorSpec, shape: tuple[int, ...],
                  plan: Plan | None) -> Tensor:
        low = name.lower()
        if name in self.indptrs and plan is not None:
            lengths = plan.queries if QUERY.search(name) else plan.pages or plan.keys
            return torch.tensor([0, *lengths]).cumsum(0)
        if plan is not None and (name == self.page_ids or name == self.table):
            return self._pages(name, shape, plan)
        if plan is not None and "last_page_len" in low:
            last = [(k - 1) % self.page_size + 1 if k else 0 for k in plan.keys]
            return torch.tensor(last + [0] * (shape[0] - len(last)))
        if plan is not None and LENGTHS.search(low):
            return torch.tensor(plan.keys)
        if "top_k" in low or low == "k":
            return self._rows(shape, (1, 20, 0 if kinds.guards_zero(self.d) else 5, 2, 3))
        if "topk_ids" in low or "expert_ids" in low:
            return self._experts(name, shape)
        if "position" in low or low.startswith("pos"):
            bound = self._bound(("max_seq_len", "max_position"), 16)
            drawn = torch.randint(0, bound, shape, generator=self.gen)
            drawn.view(-1)[-1:] = bound - 1    # the last row of a table
            return drawn
        if _STATES.search(low):
            pool = next((self.d.shape_of(s, self.sizes)[0] for n, s in self.d.inputs.items()
                         if s.floating and s.shape and "state" in n.lower()), 1)
            slots = torch.randperm(max(pool, math.prod(shape)), generator=self.gen)[
                :math.prod(shape)].view(shape) % pool
            if kinds.padded_slots(self.d) and len(slots) > 2:
                slots[1] = -1                  # padding, which the reference leaves out
            if slots.numel() and not bool((slots == 0).any()):
                slots.view(-1)[0] = 0          # the first slot is one like any other
            return slots
        if low.endswith(("indices", "ids")):
            return self._pick(shape)
        raise DataError(
            f"{self.d.name}: nothing is known of the input {name!r} ({spec.dtype}, axes "
            f"{', '.join(spec.shape or ())}) to make values for it; give it in a workload")

    def _bound(self, names: tuple[str, ...], default: int) -> int:
        known = {**self.sizes, **self.const}
        return next((known[n] for n in names if n in known), default)

    def _pages(self, name: str, shape: tuple[int, ...], plan: Plan) -> Tensor:
        pool = self.sizes.get(self.pool_axis(), self.const.get("num_pages", sum(plan.pages)))
        used = sum(plan.pages)
        ids = torch.randperm(pool, generator=self.gen)[:used] if pool >= used else \
            torch.randint(0, max(pool, 1), (used,), generator=self.gen)
        ids = kinds.out_of_order(ids, plan.pages)
        if name == self.page_ids:
            return ids.view(shape)
        table, start = torch.zeros(shape, dtype=torch.int64), 0
        for i, count in enumerate(plan.pages):
            table[i, :count] = ids[start:start + count]
            start += count
        return table

    def _experts(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Different experts for each token, weighted in the low half if only there."""
        experts = self._bound(("num_experts", "num_local_experts", "num_experts_global"), 8)
        rows = [torch.randperm(experts, generator=self.gen)[:shape[-1]]
                for _ in range(math.prod(shape[:-1]))]
        for row, expert in zip(rows, (experts - 1, 0)):
            if expert not in row:
                row[0] = expert
        ids = torch.stack(rows).view(shape) if rows else torch.empty(shape, dtype=torch.int64)
        if (any("weight" in n and "topk" in n for n in self.d.inputs)
            or self.d.inputs[name].dtype != "int32"):
            return ids
        weights = torch.rand(shape, generator=self.gen).add(0.1).to(torch.bfloat16)
        return ids << 16 | (weights.view(torch.int16).to(torch.int64) & 0xFFFF)

    def _pick(self, shape: tuple[int, ...]) -> Tensor:
        """Rows of different tokens of the cache, padded with -1 where there are not enough."""
        pool_axis = self.pool_axis()
        pool = self.sizes.get(pool_axis, self._bound(("pool_size",), 16)) * (self.page_size
                                                                             if pool_axis else 1)
        if len(shape) == 1:
            return torch.randint(0, self._bound(("pool_size", "batch_size"), pool), shape,
                                 generator=self.gen)
        return kinds.choices(math.prod(shape[:-1]), shape[-1], pool, skips(self.d), self.gen).view(
            shape)


def available_memory() -> int:
    """Bytes that are free now; 0 where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    line = next((row for row in text.splitlines() if row.startswith("MemAvailable:")), "")
    return int(line.split()[1]) * 1024 if line else 0
