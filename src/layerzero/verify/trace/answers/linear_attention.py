"""Definitions of linear attention as lz calls: the gated delta rule, and a token of Mamba-2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..definition import Definition
from ..readings import Parts, readings, text_of
from ..statements import L2NORM, POOL, SOFTPLUS, STATE, first_choice, said
from .answer import QUERY, Answer, Inputs, Outputs, call_text, lz, number, with_reading


def gated_delta_rule(definition: Definition) -> list[Answer]:
    """Decode and several tokens with a batch, or packed sequences with cu_seqlens. The decay and
    beta come from their raw parameters (A_log, a, dt_bias, b). A pool of states, which indices
    point into, is returned as it was or with the new ones."""
    p = Parts(definition, "gated_delta_rule")
    q, k, v = (p.take(pattern, what) for pattern, what in (
        (QUERY, "a query (q)"), (r"k|keys?", "a key (k)"), (r"v|values?", "a value (v)")))
    state = p.maybe(r"(initial_|h0_?|recurrent_)?states?")
    indices = p.maybe(r".*state.*(indices|idx|ids)")
    decay, log_decay = p.take(r"a|alpha|dt", "a decay for each token (a)"), p.take(
        r"a_log", "the log of the decay (A_log)")
    shift, beta = p.maybe(r"dt_bias"), p.take(r"b|beta", "the strength of an update (b)")
    starts = p.maybe(r"cu_seqlens.*|.*indptr")
    scale, _ = p.maybe(r".*scale"), p.maybe(r"intermediate_states?_buffer")
    p.done()
    out, last = p.outputs((r"o|out|output", "the output"), (r".*state.*", "the last state"))
    if indices and not state:
        raise p.unmapped(f"{indices} points into states, and no input holds them")
    key_last = re.search(r"k.?last|\[v,\s*k\]|h,?\s*v,?\s*k\]", text_of(definition)) is not None
    kept = bool(indices) and "clone" in definition.reference
    layout = said(definition, STATE, state, last)
    unit, pool_said = said(definition, L2NORM, q, k), said(definition, POOL, state, last)
    units = re.search(r"l2_?norm|normalize\(|linalg\.(vector_)?norm|\.norm\(", definition.reference)
    options = readings({"state": first_choice(layout, "k_last" if key_last else "v_last",
                                              "k_last", "v_last"),
                        **({"l2norm": first_choice(unit, True, False)} if unit or units else {}),
                        **({"pool": first_choice(pool_said, "kept" if kept else "updated", "kept",
                                                 "updated")} if indices and last else {})})

    def compute(x: Inputs, reading: Mapping[str, Any]) -> Outputs:
        def key_first(t: Tensor) -> Tensor:
            return t.transpose(-1, -2) if reading["state"] == "k_last" else t

        gates = -x[log_decay].float().exp() * F.softplus(
            x[decay].float() + (x[shift].float() if shift else 0.0))
        strength = x[beta].float().sigmoid()
        factor = number(x, scale) or None

        def attend(rows: Any, first: Tensor | None) -> tuple[Tensor, Tensor]:
            parts = [t[rows] for t in (x[q], x[k], x[v], gates, strength)]
            parts = [t[None] for t in parts] if starts else parts
            result: tuple[Tensor, Tensor] = lz(
                "gated_delta_rule", q=parts[0], k=parts[1], v=parts[2], g=parts[3], beta=parts[4],
                scale=factor, output_final_state=True,
                use_qk_l2norm_in_kernel=reading.get("l2norm", False),
                initial_state=None if first is None else key_first(first).contiguous())
            return result

        first = x[state] if state else None
        if not starts:
            chosen = first[x[indices].long()] if indices and first is not None else first
            outputs, states = attend(slice(None), chosen)
            states = key_first(states)
            if indices and first is not None:
                pool = first.clone()
                if reading.get("pool") == "updated":
                    pool[x[indices].long()] = states.to(pool.dtype)
                states = pool
            return {out: outputs, last: states}
        bounds = x[starts].tolist()
        done = [attend(slice(i, j), None if first is None else first[n:n + 1])
                for n, (i, j) in enumerate(pairwise(bounds))]
        return {out: torch.cat([o[0] for o, _ in done]),
                last: key_first(torch.cat([s for _, s in done]))}

    roles = {"query": q, "key": k, "value": v, "state": state, "indices": indices, "decay": decay,
             "log_decay": log_decay, "shift": shift, "beta": beta, "starts": starts,
             "scale": scale, "out": out, "last": last}
    text = call_text("gated_delta_rule", q, k, v, g=f"{log_decay}, {decay}", dt_bias=shift,
                     beta=beta, initial_state=state, indices=indices, scale=scale)
    return [Answer(definition, ("gated_delta_rule",), text, with_reading(compute, reading), reading,
                   "gated_delta_rule", roles,
                   statements={n: s for n, s in (
                       ("state", layout), ("l2norm", unit), ("pool", pool_said)) if s})
            for reading in options]


def selective_state_update(definition: Definition) -> list[Answer]:
    """A token of Mamba-2. Indices point into a pool of states; one below zero stands for no
    sequence: its output is zero, and no state changes."""
    p = Parts(definition, "selective_state_update")
    state, x, dt = (p.take(pattern, what) for pattern, what in (
        (r"(ssm_)?states?", "the states (state)"), (r"x|hidden_states", "an input (x)"),
        (r"dt|delta", "a time step (dt)")))
    decay, b, c = p.take(r"a", "the decay (A)"), p.take(r"b", "B"), p.take(r"c", "C")
    skip, z, shift = p.maybe(r"d"), p.maybe(r"z|gate"), p.maybe(r"dt_bias")
    indices = p.maybe(r".*state.*(indices|idx|ids)")
    p.done()
    out, last = p.outputs((r"o|out|output|y", "the output"), (r".*state.*", "the new state"))
    # Mamba-2 has a softplus wherever it has a bias
    plus = said(definition, SOFTPLUS, dt, shift, convention=True if shift else None)
    options = readings({"softplus": first_choice(plus, "softplus" in text_of(definition), True,
                                                 False)})

    def compute(v: Inputs, reading: Mapping[str, Any]) -> Outputs:
        pool = v[state]
        slots = v[indices].long() if indices else torch.arange(len(v[x]), device=pool.device)
        used = slots >= 0

        def rows(name: str) -> Tensor | None:
            return v[name][used] if name else None

        outputs, states = lz(
            "selective_state_update", state=pool[slots[used]], x=rows(x), dt=rows(dt), A=v[decay],
            B=rows(b), C=rows(c), D=v[skip] if skip else None, z=rows(z),
            dt_bias=v[shift] if shift else None, dt_softplus=reading["softplus"])
        result, pool = torch.zeros_like(v[x]), pool.clone()
        result[used], pool[slots[used]] = outputs, states
        return {out: result, last: pool}

    roles = {"state": state, "x": x, "dt": dt, "decay": decay, "b": b, "c": c, "skip": skip, "z": z,
             "shift": shift, "indices": indices, "out": out, "last": last}
    text = call_text("selective_state_update", state, x, dt, decay, b, c, D=skip, z=z,
                     dt_bias=shift, indices=indices)
    return [Answer(definition, ("selective_state_update",), text, with_reading(compute, reading),
                   reading, "selective_state_update", roles,
                   statements={"softplus": plus} if plus else {}) for reading in options]
