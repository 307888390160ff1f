"""Circumstances of calls without tensors: a tokenizer that lies where an earlier one lay."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ....ops.formulas.tokenizer.identity import TokenizerHandle, from_json
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...kernel.circumstance import Circumstance
from ...kernel.contract import call

TOKENIZER, BYTES = "tokenizer", 256            # the ids of single bytes come first
TRIES = 8


class TokenizerOfEarlier(Circumstance):
    """A tokenizer at the address of an earlier one with other ids, which is gone: what is kept by
    the id of an object alone is of that one."""

    name, any_dtype = "at the addresses of earlier tokenizers", True

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        given = values[TOKENIZER]
        if not isinstance(given, TokenizerHandle) or given.kind != "tokenizers":
            return None
        earlier, now = (_with_other_ids(given, flipped) for flipped in (BYTES - 1, 1))
        for _ in range(TRIES):
            kept = _twin(earlier)
            call(kernel, {**values, TOKENIZER: kept})
            address, gone = id(kept), weakref.ref(kept)
            del kept
            if gone() is not None:
                gc.collect()
            if gone() is not None:             # the kernel keeps it, so that its id stays its own
                return None
            twin = _twin(now)
            if id(twin) == address:
                return {**values, TOKENIZER: twin}
        return None


def _twin(handle: TokenizerHandle) -> TokenizerHandle:
    """Returns another object of the same tokenizer, made in one step: it takes the memory of one
    that has just gone."""
    twin = object.__new__(TokenizerHandle)
    for name, value in vars(handle).items():
        object.__setattr__(twin, name, {} if name == "_built" else value)
    return twin


def _with_other_ids(given: TokenizerHandle, flipped: int) -> TokenizerHandle:
    """Returns a tokenizer with the ids of single bytes exchanged."""
    data = json.loads(given.payload)
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {w: i ^ flipped if i < BYTES else i for w, i in vocab.items()}
    return from_json(json.dumps(data), given.source)


def text_circumstances(op: Op) -> Iterator[Circumstance]:
    if TOKENIZER in op.by_name:
        yield TokenizerOfEarlier()
