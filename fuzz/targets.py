"""What is fuzzed: every parser of a file that a user may bring, by name.

A target takes any bytes as such a file and uses what came out as the library would. It returns for
a file that is right and raises a LayerZeroError for one that is wrong; whatever else comes out is a
bug. Seals and hashes are put right before a file is read a second time, else nothing would ever be
found behind them.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import layerzero as lz
from layerzero.files.calls import read_calls
from layerzero.integrations.bundle import read_bundle
from layerzero.integrations.gguf.model import load_gguf
from layerzero.integrations.gguf.reader import gguf_metadata
from layerzero.integrations.hub import elf
from layerzero.integrations.hub.importing import metadata_of
from layerzero.integrations.hub.lockfile import read as read_lock
from layerzero.integrations.pipeline_tokens import gguf_tokenizer
from layerzero.ops.formulas.tokenizer.identity import from_content
from layerzero.perf import shipped
from layerzero.perf.exchange import read_lines
from layerzero.perf.record import PerfView
from layerzero.plan.force import unknown_facts
from layerzero.plan.lockfile import Lockfile, compare, load_choices, load_lockfile
from layerzero.plan.lower import compiled_find
from layerzero.plan.table import Table, digest
from layerzero.release.gate import combine
from layerzero.release.soak import SoakReport
from layerzero.release.waivers import read_waivers
from layerzero.report import history, saved, timeline
from layerzero.report.regret import read_regret
from layerzero.selection.policy import Policy, PolicyRule
from layerzero.spec.call import Call
from layerzero.spec.device import Device, table_from_json
from layerzero.spec.errors import DataError, LayerZeroError
from layerzero.spec.rules.expr import parse
from layerzero.tuning.workload import merge, read_recordings
from layerzero.verify.report import page, read_log, summarise
from layerzero.verify.trace.definition import Definition, Solution, Trace, Workload
from layerzero.verify.trace.inputs.constraints import solved, total_axis, violated
from layerzero.world import capabilities
from layerzero.world import snapshot as worlds
from layerzero.world.config import environment_layer, load_policy_file
from layerzero.world.registry import certificates

Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {}
SEAL = "the key of the fuzzer"
MAX_BYTES = 8192                               # of an input; the corpus keeps to it too


def target(of: Target) -> Target:
    TARGETS[of.__name__] = of
    return of


@functools.lru_cache(maxsize=None)
def _folder() -> Path:
    """One of this process, in memory where the system has such a place."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="layerzero-fuzz-", dir=shared if os.access(shared, os.W_OK)
                                 else None))


def _file(content: bytes, name: str) -> Path:
    path = _folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def _json(content: bytes) -> Any:
    """What the bytes say, None if they are no JSON: then only the reader of the file is of
    interest."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=None)
def _facts() -> dict[str, Any]:
    """Of one call, to ask rules and tables about."""
    import torch

    from layerzero.dispatch.facts import read
    op = lz.op("attention")
    given = op.inputs(dtype=torch.bfloat16)
    return {**worlds.current().device("cpu").facts(),
            **read(op, {p.name: given.get(p.name, p.default) for p in op.params})}


@target
def policy(content: bytes) -> None:
    """A policy file."""
    ops = {name: op.fact_names for name, op in worlds.current().catalog.ops.items()}
    layer = load_policy_file(_file(content, "policy.yaml"), ops)
    made = Policy((layer,))
    assert made.hash and str(made.settings)
    for rule in layer.rules:
        assert str(rule)
        rule.matches("attention", _facts())


@target
def capability(content: bytes) -> None:
    """capabilities.json"""
    catalog = worlds.current().catalog
    data = capabilities.load(_file(content, "capabilities.json"), catalog)
    for kernel in capabilities.apply(catalog, data).kernels:
        if kernel.op.name == "attention":
            for reason in kernel.reasons(_facts()):
                assert str(reason)
    assert capabilities.capabilities_hash(data)


@target
def table(content: bytes) -> None:
    """dispatch_table.json, also as the module of comparisons it is turned into."""
    def use(made: Table) -> None:
        assert Table.from_json(json.loads(json.dumps(made.to_json()))) == made
        assert made.steps("nothing", {}) is None and str(made)
        assert all(str(rule) for op in made.by_op for rule in made.leaves(op))
        find, ops = compiled_find(made), worlds.current().catalog.ops
        # else it is refused
        if not any(unknown_facts(row, ops[row.op]) for row in made.rows if row.op in ops):
            assert (find("attention", _facts()) < 0) == (made.find("attention", _facts()) is None)

    _twice(content, "table.json", lambda path: use(Table.load(path)))


@target
def lockfile(content: bytes) -> None:
    """layerzero.lock"""
    def use(path: Path) -> None:
        made = load_lockfile(path)
        assert Lockfile.from_json(json.loads(json.dumps(made.to_json()))) == made and made.id

    _twice(content, "layerzero.lock", use)


def _twice(content: bytes, name: str, use: Callable[[Path], None]) -> None:
    """As it is, and with the hash that its content has."""
    wrong: LayerZeroError | None = None
    try:
        use(_file(content, name))
    except LayerZeroError as e:
        wrong = e
    data = _json(content)
    if wrong is not None and isinstance(data, dict):
        data["hash"] = digest({k: v for k, v in data.items() if k != "hash"})
        use(_file(json.dumps(data).encode(), name))
    if wrong is not None:
        raise wrong


@target
def definition(content: bytes) -> None:
    """A definition of the FlashInfer-Trace schema, and the arithmetic of its constraints."""
    made = Definition.load(_file(content, "definition.json"))
    assert Definition.from_json(json.loads(json.dumps(made.to_json()))) == made
    sizes = dict.fromkeys(made.var_axes, 2)
    for spec in (*made.inputs.values(), *made.outputs.values()):
        made.shape_of(spec, sizes)
    known = {**sizes, **made.const_axes}
    violated(made.constraints, known)
    solved(made.constraints, made.var_axes, made.const_axes)
    for name in made.inputs:
        total_axis(made.constraints, name)


@target
def solution(content: bytes) -> None:
    """A solution: source code that claims to compute a definition. It is never run here."""
    made = Solution.load(_file(content, "solution.json"))
    assert Solution.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert made.digest and made.entry_file in [s.path for s in made.sources]


@target
def trace(content: bytes) -> None:
    """Lines of traces, and of workloads."""
    for made in Trace.load_lines(_file(content, "traces.jsonl")):
        Trace.from_json(json.loads(json.dumps(made.to_json())))
    data = _json(content)
    if isinstance(data, dict):
        Workload.from_json(data.get("workload", data))


@target
def calls(content: bytes) -> None:
    """Lines of calls, as lz record writes them and lz tune reads them."""
    path = _file(content, "recorded/1.jsonl")
    made = read_calls(path)
    for call in made:
        # compared as text: NaN is no less a value of a call
        text = json.dumps(call.to_json())
        assert json.dumps(Call.from_json(json.loads(text)).to_json()) == text
    # of a case inputs are made
    if all(type(n) is not int or n < 5000 for call in made for n in _leaves(call.case)):
        known = worlds.current().catalog.ops
        merge(call for call in made if call.op in known)
        read_recordings(path.parent)


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, (Mapping, list, tuple)):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from _leaves(part)
    else:
        yield data


@target
def certificate(content: bytes) -> None:
    """A certificate; sealed anew, so that what is behind the seal is reached too."""
    os.environ["LAYERZERO_SEAL_KEY"] = SEAL
    data = _json(content)
    wrong: LayerZeroError | None = None
    try:
        certificates.read(_file(content, "certificate.json"))
    except LayerZeroError as e:
        wrong = e
    if wrong is not None and isinstance(data, dict) and isinstance(data.get("certificate"), dict):
        body = data["certificate"]
        sealed = json.dumps({"certificate": body,
                             "seal": certificates._seal(body, SEAL.encode())}).encode()
        made = certificates.read(_file(sealed, "certificate.json"))
        assert certificates.Certificate.from_json(json.loads(json.dumps(made.to_json()))) == made
        made.void_reason(worlds.current().catalog.by_id["reference.rms_norm"],
                         worlds.current().device("cpu"))
    if wrong is not None:
        raise wrong


@target
def measurements(content: bytes) -> None:
    """What lz perf export writes and lz perf import reads."""
    rows, _, rates = read_lines(_file(content, "perf.jsonl"))
    view = PerfView(rows, {place: r for place, (r, _) in rates.items()})
    for row in rows:
        assert view.get(row.kernel, row.bucket, row.place) is not None and row.trust > 0


@target
def regret(content: bytes) -> None:
    """What lz regret --json writes and lz report reads."""
    assert read_regret(_file(content, "regret.json")).place is not None


@target
def report(content: bytes) -> None:
    """What lz report --json writes and lz report --against reads."""
    read = saved.read_report(_file(content, "report.json"))
    comparison = saved.compare(read, read)
    assert comparison.gain in (None, 1.0) and not comparison.with_verdict("faster", "slower", "new")
    kinds = {(k.op, k.bucket): history.Reference(k.calls, k.us, k.torch_us or k.us)
             for k in read.kinds}
    points = history.trace(history.times_of(read, "eager"), kinds)
    if points and points[0].us:
        assert timeline.plot((replace(points[0], at=points[0].at / 2), *points))


@target
def device(content: bytes) -> None:
    """A device as lz doctor --json has it, or a table of generations."""
    data = _json(content)
    if isinstance(data, list):
        table_from_json(data)
    else:
        made = Device.from_json(data)
        assert (Device.from_json(json.loads(json.dumps(made.to_json()))) == made and made.signature
                and made.facts())


@target
def expression(content: bytes) -> None:
    """Arithmetic over facts, as declarations and capabilities have it, and over the sizes of a
    definition."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return
    made = parse(text)
    made(dict.fromkeys(made.names, 3))


@target
def rule(content: bytes) -> None:
    """A rule of a policy as JSON, such as lz config --json has it."""
    made = PolicyRule.from_json(_json(content))
    made.matches("attention", _facts())
    assert str(made) and PolicyRule.from_json(json.loads(json.dumps(made.to_json()))) == made


@target
def environment(content: bytes) -> None:
    """Environment variables of the library, one NAME=value a line."""
    pairs = (line.partition("=") for line in content.decode(errors="surrogateescape").split("\n"))
    ops = {name: op.fact_names for name, op in worlds.current().catalog.ops.items()}
    layer = environment_layer({name: value for name, sign, value in pairs if sign and name}, ops)
    assert layer is None or Policy((layer,)).hash


@target
def choices(content: bytes) -> None:
    """Two tables or lockfiles, one a line, as lz diff compares them."""
    first, _, second = content.partition(b"\n")
    found = [load_choices(_file(_rehashed(part), "choices.json"))
             for part in (first, second or first)]
    assert all(str(difference.verdict) for difference in compare(*found))


def _rehashed(content: bytes) -> bytes:
    data = _json(content)
    if not isinstance(data, dict):
        return content
    return json.dumps({**data,
                       "hash": digest({k: v for k, v in data.items() if k != "hash"})}).encode()


@target
def workload(content: bytes) -> None:
    """A workload of a definition, and the inputs made of it."""
    made = Workload.from_json(_json(content))
    assert Workload.from_json(json.loads(json.dumps(made.to_json()))) == made


@target
def shipped_table(content: bytes) -> None:
    """A table of measurements that comes with the package."""
    made = shipped.read(_file(content, "shipped.json"), worlds.current().catalog.ops)
    made.view("here", {m.kernel for m in made.rows})


@target
def tokenizer_json(content: bytes) -> None:
    """A tokenizer.json, identified and used."""
    handle = from_content(content, "tokenizer.json")
    assert handle.id
    for prefix in (False, True):
        lz.tokenize("the lazy dog \u65e5\u672c " * 30, handle, cache_prefix=prefix)
    lz.detokenize([0, 1, 2], handle)


@target
def tiktoken_ranks(content: bytes) -> None:
    """A *.tiktoken file."""
    whole = b"".join(b"%s %d\n" % (base64.b64encode(bytes((b,))), b) for b in range(256))
    handle = from_content(content if content.startswith(b"AA==") else whole + content,
                          "cl.tiktoken", r"\w+|\W",
                          {"<s>": 100_000})
    lz.tokenize("the lazy dog", handle)


@target
def sentencepiece_model(content: bytes) -> None:
    """A sentencepiece *.model: what is identified of it. Its library is not given it."""
    assert from_content(b"\n" + content, "tokenizer.model").id


@target
def gguf(content: bytes) -> None:
    """A GGUF file: its header, its tokenizer, its weights, and one token through them."""
    path = _file(content, "gguf/model.gguf")
    gguf_metadata(path)
    wrong: LayerZeroError | None = None
    for read in (gguf_tokenizer, _first_logits):
        try:
            read(path)
        except LayerZeroError as e:
            wrong = e
    if wrong is not None and b"llama.block_count" in content:
        raise wrong


def _first_logits(path: Path) -> None:
    model = load_gguf(path, activations="none")
    assert model.logits([0]).shape == (1, 1, model.config.vocab)


@target
def hub_lock(content: bytes) -> None:
    """hub.lock, or kernels.lock."""
    assert read_lock(_file(content, "hub.lock")).to_json()


@target
def hub_metadata(content: bytes) -> None:
    """metadata.json of a build in a repository of kernels."""
    path = _file(content, "build/metadata.json")
    assert metadata_of(path.parent).id


@target
def elf_file(content: bytes) -> None:
    """A compiled file of a repository of kernels, of which is read what it needs."""
    path = _file(content or b"\0", "build/kernel.so")
    for problem in (*elf.load_problems(path), elf.portability_problem(path)):
        assert isinstance(problem, str)
    if list(elf.load_problems(path)):
        raise DataError("it cannot be loaded here")


@target
def waiver(content: bytes) -> None:
    """A file of waivers of the gate."""
    for made in read_waivers(_file(content, "waivers.yaml")):
        assert made.covers(made.what, made.target)


@target
def gate_report(content: bytes) -> None:
    """What lz gate --out writes and lz gate --combine reads."""
    combine([_file(content, "gate.json")], [])


@target
def soak_report(content: bytes) -> None:
    """What lz soak --out writes, and --resume and lz gate read."""
    made = SoakReport.load(_file(content, "soak.json"))
    assert SoakReport.from_json(json.loads(json.dumps(made.to_json())), "again") == made


@target
def verdicts(content: bytes) -> None:
    """A log of verdicts, as lz verify report reads it."""
    page(summarise(read_log(_file(content, "log.jsonl"))), ())


@target
def bundle(content: bytes) -> None:
    """An archive of lz bundle."""
    assert "manifest.json" in read_bundle(_file(content, "bundle.tar.gz"))
