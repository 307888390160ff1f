"""Faults of what belongs to one row or one sequence of a batch: the tokens that each penalty reads,
the seed of a row, the bytes of a sequence. The op's own cases find every one of them.
"""

from __future__ import annotations

import codecs
import json
from typing import Any

import pytest
import torch
from broken_kernels import FAULTS, Fault, fault

import layerzero as lz
from layerzero.ops.formulas.sampling import Penalties, count_tokens, penalize
from layerzero.ops.formulas.tokenizer.bpe import BYTES, ByteLevelBPE
from layerzero.ops.formulas.tokenizer.tokenization import read_sequences
from layerzero.ops.sample import PENALTIES
from layerzero.verify.cases.generated import given_arguments
from layerzero.verify.kernel.contract import case_outline, case_values, check_case
from layerzero.world import snapshot as worlds

_BEFORE = len(FAULTS)
_DRAWS = ("sample", "speculative_verify", "speculative_verify_tree")
_OPS = sorted({k.op for k in worlds.current().catalog.by_id.values()}, key=lambda op: op.name)


# What a penalty reads.

def _penalized(v: dict[str, Any], read: Any) -> dict[str, Any]:
    """Returns the call with its logits penalized, each penalty by what `read` gives of history and
    counts: the tokens it repeats, those that are present, how often each occurs."""
    if v["token_counts"] is None and v["history"] is None:
        return v
    x = v["logits"].to(torch.promote_types(v["logits"].dtype, torch.float32))
    history = (torch.zeros_like(x) if v["history"] is None
               else count_tokens(v["history"], x.shape[-1], x.dtype))
    counts = history if v["token_counts"] is None else v["token_counts"].to(x.dtype)
    repeated, present, often = read(history, counts)
    repetition, presence, frequency = (
        v[name] if v[f"{name}_rows"] is None else v[f"{name}_rows"][:, None] for name in PENALTIES)
    x = penalize(x, repeated > 0, often, Penalties(repetition, 0.0, frequency))
    x = penalize(x, repeated > 0, present, Penalties(1.0, presence, 0.0))
    off = {f"{name}_rows": None for name in PENALTIES} | PENALTIES
    return {**v, **off, "logits": x, "history": None, "token_counts": None}


@fault("sample")
def presence_counted_from_the_history_too(right, **v):
    return right(**_penalized(v, lambda history, counts: (
        history + counts, history + counts, counts)))


@fault("sample")
def frequency_counted_from_the_history_too(right, **v):
    return right(**_penalized(v, lambda history, counts: (
        history + counts, counts, counts if v["token_counts"] is None else history + counts)))


@fault("sample")
def repetition_read_from_the_history_alone(right, **v):
    return right(**_penalized(v, lambda history, counts: (
        counts if v["history"] is None else history, counts, counts)))


@fault("sample")
def repetition_read_from_the_counts_alone(right, **v):
    return right(**_penalized(v, lambda history, counts: (counts, counts, counts)))


@fault("sample")
def a_token_of_the_history_counts_once(right, **v):
    return right(**_penalized(v, lambda history, counts: (
        history + counts, counts,
        (counts > 0).float() if v["token_counts"] is None else counts)))


@fault("sample")
def counts_ignored_without_repetition(right, **v):
    off = v["repetition_penalty"] == 1.0 and v["repetition_penalty_rows"] is None
    return right(**_penalized(v, lambda history, counts: (
        history + counts, *([torch.zeros_like(counts)] * 2 if off else [counts] * 2))))


@fault("sample")
def presence_of_the_first_row_for_all(right, **v):
    rows = v["presence_penalty_rows"]
    return right(**{**v, "presence_penalty_rows": None if rows is None
                    else rows[:1].expand_as(rows)})


# What a row draws.

def _for_each_draw(change: Any) -> None:
    """Registers a fault of the seeds of rows for every op that has them."""
    for op in _DRAWS:
        def wrong(right: Any, **v: Any) -> Any:
            rows = v["seed_rows"]
            return right(**(v if rows is None else {**v, **change(rows, v)}))

        wrong.__name__ = f"{op}_{change.__name__.lstrip('_')}"
        fault(op)(wrong)


def _seed_of_a_row_mixed_with_its_place(rows: Any, v: dict[str, Any]) -> dict[str, Any]:
    return {"seed_rows": rows + torch.arange(len(rows))}


def _seeds_from_that_of_the_first_row(rows: Any, v: dict[str, Any]) -> dict[str, Any]:
    """As where the seeds are those of neighbours."""
    step = rows[1:2] - rows[:1] if len(rows) > 1 else 0
    return {"seed_rows": rows[:1] + torch.arange(len(rows)) * step}


def _seed_of_the_first_row_for_all(rows: Any, v: dict[str, Any]) -> dict[str, Any]:
    return {"seed_rows": None, "seed": int(rows[0]) if len(rows) else 0}


def _offset_forgotten_with_seeds_of_rows(rows: Any, v: dict[str, Any]) -> dict[str, Any]:
    return {"offset": 0}


def _short_seeds_without_a_sign(rows: Any, v: dict[str, Any]) -> dict[str, Any]:
    return {"seed_rows": rows.long() & 0xFFFFFFFF if rows.dtype == torch.int32 else rows}


for _change in (_seed_of_a_row_mixed_with_its_place, _seeds_from_that_of_the_first_row,
                _seed_of_the_first_row_for_all, _offset_forgotten_with_seeds_of_rows,
                _short_seeds_without_a_sign):
    _for_each_draw(_change)


# What belongs to a sequence.

def _bytes_of(v: dict[str, Any]) -> tuple[list[list[bytes]], bool]:
    """Returns the bytes of each token of each sequence, nothing for one that is left out."""
    bpe = ByteLevelBPE(json.loads(v["tokenizer"].payload))
    sequences, single = read_sequences(v["ids"])

    def raw(i: int) -> bytes:
        if i not in bpe.tokens or (v["skip_special_tokens"] and i in bpe.special):
            return b""
        return bytes(BYTES[c] for c in bpe.tokens[i])

    return [[raw(i) for i in ids] for ids in sequences], single


@fault("detokenize")
def sequences_share_a_buffer_of_bytes(right, **v):
    rows, single = _bytes_of(v)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(b"".join(row), i == len(rows) - 1) for i, row in enumerate(rows)]
    return texts[0] if single else texts


@fault("detokenize")
def a_character_is_completed_by_the_next_sequence(right, **v):
    """Only where it is then a character: else each ends as it should."""
    rows, single = _bytes_of(v)
    joined, rest = [b"".join(row) for row in rows], []
    for i, raw in enumerate(joined):
        after = joined[i + 1] if i + 1 < len(joined) else b""
        tail = next((raw[-n:] for n in (3, 2, 1) if len(raw) >= n and raw[-n] >= 0xC0), b"")
        whole = next((tail + after[:n] for n in (1, 2, 3) if tail and _is_text(tail + after[:n])),
                     b"")
        if whole and not _is_text(tail):
            joined[i], joined[i + 1] = raw[:-len(tail)], after[len(whole) - len(tail):]
            rest.append(whole.decode())
        else:
            rest.append("")
    texts = [raw.decode("utf-8", "replace") + more for raw, more in zip(joined, rest)]
    return texts[0] if single else texts


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@fault("detokenize")
def an_omitted_token_ends_a_character(right, **v):
    rows, single = _bytes_of(v)
    texts = []
    for row in rows:
        parts: list[bytes] = [b""]
        for raw in row:
            parts[-1:] = [parts[-1] + raw] if raw else [parts[-1], b""]
        texts.append("".join(part.decode("utf-8", "replace") for part in parts))
    return texts[0] if single else texts


@fault("detokenize")
def one_text_is_a_list_of_one(right, **v):
    texts = right(**v)
    return [texts] if isinstance(texts, str) else texts


@fault("detokenize")
def a_list_of_one_is_its_text(right, **v):
    texts = right(**v)
    return texts[0] if len(texts) == 1 else texts


@fault("detokenize")
def texts_are_a_tuple(right, **v):
    texts = right(**v)
    return texts if isinstance(texts, str) else tuple(texts)


@fault("tokenize")
def tokens_are_a_list_of_one(right, **v):
    return [right(**v)]


def completed_by_the_next(right, v, start, rest):
    """The end `rest` of a word is taken from the next text."""
    texts = v["text"]
    if isinstance(texts, str):
        return right(**v)
    moved = list(texts)
    for i, text in enumerate(moved[1:], 1):
        if moved[i - 1].endswith(start) and text.startswith(rest):
            moved[i - 1:i + 1] = [moved[i - 1] + rest, text[len(rest):]]
    return right(**{**v, "text": moved})


@fault("tokenize")
def a_special_token_is_completed_by_the_next_text(right, **v):
    return completed_by_the_next(right, v, "</", "s>")


@fault("tokenize")
def equal_texts_are_encoded_once(right, **v):
    texts = v["text"]
    return right(**{**v, "text": texts if isinstance(texts, str) else list(dict.fromkeys(texts))})


@fault("tokenize")
def a_word_is_completed_by_the_next_text(right, **v):
    return completed_by_the_next(right, v, "hell", "o")


ROW_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]


@pytest.mark.parametrize("planted", ROW_FAULTS, ids=lambda f: f.name)
def test_the_cases_of_the_op_find_it(planted: Fault) -> None:
    kernel, dtype = planted.kernel(), planted.op.dtypes[0]
    assert any(check_case(kernel, case, dtype).status == "failed" for case in planted.op.cases)


@pytest.mark.parametrize("name", ("sample", "detokenize", "tokenize"))
def test_the_same_steps_without_a_fault_pass(name: str) -> None:
    """What the faults are made of is right by itself."""
    def sound(right: Any, **v: Any) -> Any:
        if name == "sample":
            return right(**_penalized(v, lambda history, counts: (
                history + counts, counts, counts)))
        if name == "tokenize":
            return right(**v)
        rows, single = _bytes_of(v)
        texts = [b"".join(row).decode("utf-8", "replace") for row in rows]
        return texts[0] if single else texts

    fault(name)(sound)
    kernel = FAULTS.pop().kernel()
    failed = [str(r) for case in kernel.op.cases
              if (r := check_case(kernel, case, kernel.op.dtypes[0])).status == "failed"]
    assert failed == []


@pytest.mark.parametrize("op", [op for op in _OPS if op.tensors], ids=lambda op: op.name)
def test_every_optional_tensor_is_given_by_a_case(op: Any) -> None:
    """A tensor that no case gives is one that nothing is known of."""
    missing = {p.name for p in op.params if not p.required and p.name in op.tensors}
    for case in op.cases:
        missing -= given_arguments(op, case_outline(op, case, op.dtypes[0])) if missing else set()
    assert missing == set()


@pytest.mark.parametrize("name", _DRAWS)
@pytest.mark.parametrize("random", ("seed_rows", "short_seed_rows", "uniforms"))
def test_the_place_of_a_row_does_not_matter(name: str, random: str) -> None:
    """Rows in another order give their results in that order, and equal rows equal ones."""
    op, order = lz.op(name), torch.tensor([3, 8, 0, 5, 1, 7, 2, 6, 4])
    values = case_values(op, {"random": random, "batch": 9}, "float32")
    moved = {n: v[order] if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    for kernel in worlds.current().catalog.kernels_of(name):
        if kernel.backend not in ("reference", "torch") or "greedy" in kernel.id:
            continue
        first, second = (kernel.load()(**v) for v in (values, moved))
        assert all(torch.equal(a[order], b) for a, b in zip(first, second)), kernel.id
        if random != "uniforms":
            assert all(torch.equal(t[0], t[-1]) for t in first), kernel.id


@pytest.mark.parametrize("rows", (False, True))
@pytest.mark.parametrize("penalty", PENALTIES)
def test_each_penalty_shows_what_it_reads(penalty: str, rows: bool) -> None:
    """Without one of its operands, or with one for the other, the call has another result."""
    op = lz.op("sample")
    values = case_values(op, {"penalties": "history counts", "only": penalty, "rows": rows,
                              "vocab": 33}, "float32")
    others = [name for name in PENALTIES if name != penalty]
    assert all(values[name] == PENALTIES[name] and values[f"{name}_rows"] is None
               for name in others)
    right = op.reference(**values)
    for operand in ("history", "token_counts"):
        other = op.reference(**{**values, operand: None})
        reads = operand == "token_counts" or penalty == "repetition_penalty"
        assert (not torch.equal(right[1], other[1])) is reads
