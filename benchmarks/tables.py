"""What a choice made ahead of time costs: a table's lookup, a bound kernel, a baked model.

    python benchmarks/tables.py  about half a minute; a table, and results/local/tables.json
    python benchmarks/tables.py --quick
        some seconds; shows that everything runs, its numbers say little

README.md says how it is measured and how to read it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from dispatch import BY_HAND, EPS, RMS_BY_HAND, environment, prepare
from timing import Contestant, Race, race
from torch import Tensor

import layerzero as lz
from layerzero.dispatch.dispatcher import Dispatcher
from layerzero.plan.lower import module
from layerzero.plan.table import Span
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.grid import bucket_top
from layerzero.spec.kernel import Direct
from layerzero.world import snapshot as worlds
from layerzero.world.incidents import loaded

OUT = Path(__file__).parent / "results" / "local" / "tables.json"
SITES = 32                                     # lz calls of the small model
# what the table is solved for: a chat, short and long
SEQS = (1, 2, 3, 4, 40, 300, 2000, 16000)
GOALS = {"table lookup": 150.0, "bound kernel": 60.0}


def calls(dtype: str) -> list[Call]:
    """Attention and norm as the tiny calls have them, from one token to sixteen thousand."""
    shape = TensorSpec((1, 1, 4, 16), dtype)
    found = [Call("attention", {"query": TensorSpec((1, 1, q, 16), dtype),
                                "key": TensorSpec((1, 1, k, 16), dtype),
                                "value": TensorSpec((1, 1, k, 16), dtype)}) for q in SEQS
             for k in (*SEQS, 4)]
    norms = [Call("rms_norm", {"x": TensorSpec((n, 16), dtype), "weight": TensorSpec((16,), dtype),
                               "eps": EPS})
             for n in SEQS]
    return [Call("attention", dict.fromkeys(("query", "key", "value"), shape)), *found, *norms]


def lookups(table: lz.tables.Table, attention: Dispatcher,
            tensors: tuple[Tensor, ...]) -> Iterator[Contestant]:
    """Finding the row of a call: from plain sizes, from its facts, from its tensors."""
    values = attention.order_arguments(tensors, {})
    facts = attention.facts(values, worlds.current())
    cut = crowded(table, facts)
    for found, label in ((table, ""), (cut, f", {len(cut.rows)} rows")):
        lowered = module(found)
        index = lowered["find"]("attention", facts)
        assert found.rows[index] == found.find("attention", facts)
        family = next(f for n, f in lowered.items() if n.startswith("attention_")
                      and f(*sizes_of(f, facts)) == index)
        names = family.__code__.co_varnames[:family.__code__.co_argcount]
        yield Contestant(f"lowered: sizes -> row{label}", f"out = f({', '.join(names)})",
                         {"f": family, **dict(zip(names, sizes_of(family, facts)))})
        yield Contestant(f"lowered: facts -> row{label}", "out = f(facts)",
                         {"f": lowered["attention"], "facts": facts})
    yield Contestant("table as data: facts -> row", "out = f('attention', facts)",
                     {"f": table.find, "facts": facts})
    scope = dict(zip("qkv", tensors))
    if attention.native is not None:
        yield Contestant("native call path: tensors -> entry", "out = f(q, k, v)",
                         {"f": attention.native.compiled.lookup, **scope})
    rest = ", ".join(map(repr, values[3:]))
    yield Contestant("Python call path: tensors -> entry", f"out = find(f(q, k, v, {rest}))",
                     {"f": attention.key_of, "find": attention.cache.table.get, **scope})


def sizes_of(function: Any, facts: dict[str, Any]) -> list[Any]:
    return [facts[n] for n in function.__code__.co_varnames[:function.__code__.co_argcount]]


def crowded(table: lz.tables.Table, facts: dict[str, Any]) -> lz.tables.Table:
    """A table as it would be if every bucket had another winner: the row of this call, cut into
    many."""
    row = table.find("attention", facts)
    assert row is not None
    edges = sorted({bucket_top(n) for n in SEQS})
    spans = [Span(low + 1, high) for low, high in zip([0, *edges], edges)]
    pieces = [replace(row, sizes=tuple((n, q if n == "seq_q" else k if n == "seq_k" else s)
                                       for n, s in row.sizes))
              for q in spans for k in spans]
    return replace(table, rows=tuple(pieces))


def kernels(s: Any) -> Iterator[Contestant]:
    """A kernel by hand, the same one bound, and the op that looks it up."""
    scope, result = s.tiny.qkv, s.tiny.result
    name, call = BY_HAND[s.kernels[0]]
    yield Contestant("attention by hand", f"out = {call}", {**scope, "f": getattr(torch, name)}, "",
                     result)
    bound = lz.tables.bind("attention", *scope.values())
    for label, f in (("lz.tables.bind: attention", bound), ("lz.attention", lz.attention)):
        yield Contestant(label, "out = f(q, k, v)", {**scope, "f": f}, "attention by hand", result)
    x, w, eps = (s.norm[n] for n in ("x", "w", "eps"))
    # the kernel as its backend declares it
    own = loaded(worlds.current().catalog.by_id[s.kernels[1]])
    if isinstance(own, Direct):
        own = own.otherwise or own.fn
    yield Contestant("rms_norm by hand", "out = f(x, w, eps)",
                     {"x": x, "w": w, "eps": eps, "f": own}, "", s.rms_result)
    yield Contestant(
        "lz.tables.bind: rms_norm", "out = f(x, w)",
        {"x": x, "w": w, "f": lz.tables.bind("rms_norm", x, w, eps)},
        "rms_norm by hand", s.rms_result)
    yield Contestant("lz.rms_norm", "out = f(x, w, eps)",
                     {"x": x, "w": w, "eps": eps, "f": lz.rms_norm},
                     "rms_norm by hand", s.rms_result)


def nothing(s: Any) -> Iterator[Contestant]:
    """The same with a kernel in C that does nothing: no kernel's own noise hides what a call costs.
    """
    x = s.norm["x"]
    lz.unlock()
    lz.register(lz.Kernel("benchmark.nothing", lz.op("rms_norm"),
                          lambda: lz.kernels.direct(id, "x"), prior=1e9,
                          less_work="none at all"))
    bound = lz.tables.bind("rms_norm", x)
    assert bound.kernel == lz.which("rms_norm", x) == "benchmark.nothing"
    direct = "id(x), by hand"
    for label, f, target in ((direct, id, ""), ("lz.tables.bind: nothing", bound, direct),
                             ("lz.rms_norm: nothing", lz.rms_norm, direct)):
        yield Contestant(label, "out = f(x)", {"x": x, "f": f}, target)


def models(s: Any) -> Iterator[Contestant]:
    """A chain of norms, so that little but the calls remains; times are of the whole chain."""
    name, _ = RMS_BY_HAND[s.kernels[1]]
    kernel, size, item = getattr(torch, name), s.norm["size"], "fused" in name

    def chain(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(SITES):
            x = lz.rms_norm(x, w, EPS)
        return x

    def by_hand(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(SITES):
            out = kernel(x, size, w, EPS)
            x = out[0] if item else out
        return x

    scope = {"x": s.norm["x"], "w": s.norm["w"]}
    want = by_hand(*scope.values())
    baked = lz.compile(chain, *scope.values(), dynamic=False)
    assert [site.kernel for site in baked.sites] == [s.kernels[1]] * SITES
    for label, f, target in (("by hand", by_hand, ""), ("lz", chain, "by hand"),
                             ("lz.compile", baked, "by hand")):
        yield Contestant(f"{SITES} norms, {label}", "out = f(x, w)", {**scope, "f": f},
                         target and f"{SITES} norms, {target}", want)


def rows(runners: Sequence[Contestant], found: Race) -> list[dict[str, Any]]:
    return [{"name": c.name, "ns": found.of(c.name).to_json(), "target": c.target,
             "over": over.to_json() if (over := found.over(c.name)) else None} for c in runners]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some seconds: does everything run?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda"
                        if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=OUT,
                        help="where the JSON goes (default: %(default)s)")
    args = parser.parse_args(argv)
    rounds, batch = (4, 10) if args.quick else (800, 25)
    torch.set_num_threads(1)
    env = environment()
    with torch.no_grad():
        s = prepare(args.device)
        table = lz.tables.solve(calls(str(s.tiny.result.dtype)[6:]), device=args.device)
        lz.tables.use_table(table)
        print(f"{table}, load average {env['load_average']}\n")
        lz.attention(*s.tiny.qkv.values())     # the entry is there: what is measured is a hit
        assert lz.explain("attention", *s.tiny.qkv.values()).table == table.id
        parts: dict[str, list[dict[str, Any]]] = {}
        for name, make in (("lookup",
                            lambda: lookups(table, s.attention, tuple(s.tiny.qkv.values()))),
                           ("kernel", lambda: kernels(s)), ("model", lambda: models(s)),
                           ("a kernel that does nothing", lambda: nothing(s))):
            runners = list(make())
            parts[name] = rows(runners, race(runners, rounds, batch if name != "model" else 4,
                                             s.wait))
            print(f"{name:<40}{'ns':>9}{'over its target':>18}{'p10 .. p90':>20}")
            for row in parts[name]:
                over = row["over"]
                spread = (f"{over['median']:>18.0f}{over['p10']:>12.0f} .. {over['p90']:.0f}"
                          if over else "")
                print(f"  {row['name']:<38}{row['ns']['median']:>9.0f}{spread}")
            print()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        "benchmark": "tables", "quick": args.quick, "environment": env, "goals_ns": GOALS,
        "table": {"id": table.id, "rows": len(table.rows)}, "parts": parts}, indent=1) + "\n")
    print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
