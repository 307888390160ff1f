"""What the text of a definition says of its open points, and the schema's conventions where it
says nothing.

Text is the name, the tags, the descriptions and the reference's docstring. The reference's code is
no part of it: it is what is verified, so it decides only where the text is silent.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .definition import Definition

Rules = Sequence[tuple[str, Any]]              # pattern -> value; the leftmost match of a text says

LLAMA4 = r"llama[ -]?4|routing method type=3"
DEEPSEEK = r"\bds routing|deepseek[ -]?(v3 )?routing|routing method type=2"
BASES: Rules = ((r"not (of )?base[ -]?2|natural(?! lang)|base[ -]?e\b|\blse e\b|\bln\b", "e"),
                (r"2[ -]based|base[ -]?(2|two)|log2", "2"))
CAUSAL: Rules = ((r"(non|not|no|without|without a|without any)[ -]?causal|causal ?= ?false|"
                  r"causal mask(ing)? is (not|off|disabled)|bidirectional", False),
                 (r"causal", True))
ROPE: Rules = ((r"neox|rotate half", "rotate_half"), (r"gpt-?j|interleav", "interleaved"))
OFFSET: Rules = ((r"one plus|\b1(\.0)? ?\+ ?(w|gamma)|(weight|gamma|\bw) ?\+ ?1\b|"
                  r"(1|one) (is )?added to (the |its )?weight|stored minus (1|one)|"
                  r"zero[ -]cent(er|re)d|gemma[ -]?\d?n? (\w+ )?(fused add )?rms ?norm", 1.0),)
GATE: Rules = ((r"\[? ?up ?[;,|] ?gate ?\]|up (\w+ )?(is |are |comes )?first|"
                r"up (before|then) (the )?gate|first half (is|holds) (the )?up", False),
               (r"\[? ?gate ?[;,|] ?up ?\]|gate (\w+ )?(is |are |comes )?first|"
                r"gate (before|then) (the )?up|first half (is|holds) (the )?gate", True))
SCORING: Rules = ((rf"sigmoid|{LLAMA4}|{DEEPSEEK}", "sigmoid"),
                  (r"softmax|routing method type=[01]", "softmax"))
NORMALIZED: Rules = (
    (rf"(not|no|without|un) ?-?(re)?norm|norm topk prob ?[=:] ?false|softmax ?-> ?top|"
     rf"routing method type=0|{LLAMA4}", False),
    (rf"renorm|(?<!softmax.)normali[sz]ed|norm topk prob ?[=:] ?true|routing method type=1|"
     rf"top-?k ?-> ?softmax|{DEEPSEEK}", True))
# what models do of which the text says no more than the name
SCORES: Rules = ((r"mixtral|qwen|olmoe|\bdbrx|deepseek[ -]?v2", "softmax"),
                 (r"kimi|glm-?4\.5|deepseek[ -]?(v3|r1)", "sigmoid"))
NORMALIZING: Rules = ((r"mixtral|qwen-?3|\bdbrx", True), (r"qwen-?(1\.5|2)[ -]?moe|olmoe", False))
ACTIVATION: Rules = (
    (r"(geglu|gelu)[^.;]{0,20}tanh|tanh[^.;]{0,20}gelu", "geglu_tanh"), (r"geglu|gelu", "geglu"),
    (r"reglu|\brelu\b", "reglu"), (r"swiglu|silu|swish", "swiglu"))
WEIGHT_ON: Rules = ((rf"{LLAMA4}|scale[ds]? (at|the|on)? ?input|applied to (the )?input|"
                     r"weights? on (the )?input|scales on input ?= ?true", "input"),)
BIAS: Rules = ((rf"bias (is |are )?ignored|ignores? the (routing )?bias|{LLAMA4}", "ignored"),
               (rf"{DEEPSEEK}|bias (is )?added to (the )?sigmoid", "choice"))
L2NORM: Rules = ((r"(no|not|without) (qk )?l2[ -]?norm", False),
                 (r"l2[ -]?norm|normali[sz]ed to (unit|length)", True))
STATE: Rules = ((r"k[ -]last", "k_last"), (r"v[ -]last", "v_last"))
POOL: Rules = ((r"unchanged(?! if)|(not|never) (updated|modified|written)|states? (is|are) kept",
                "kept"),
               (r"(pools?|states?)( of [^.;]*)? (is|are) (updated|written)|updated in[ -]place",
                "updated"))
SOFTPLUS: Rules = ((r"(no|without) softplus", False), (r"softplus", True))


@dataclass(frozen=True)
class Statement:
    """A value, who says it ("its name says"), and who of its text says otherwise."""

    value: Any
    source: str
    otherwise: tuple[str, Any] | None = None


def plain(text: str) -> str:
    return text.lower().replace("_", " ")


def texts(definition: Definition, *tensors: str) -> Iterator[tuple[str, str]]:
    """(who says, what), the name first. What follows @ or two underscores tells variants of a
    definition apart and says nothing of what it computes."""
    yield "its name says", plain(re.split("@|__", definition.name)[0])
    yield "its tags say", plain(" ; ".join(definition.tags))
    yield "its description says", plain(definition.description)
    specs = {**definition.inputs, **definition.outputs}
    for tensor in tensors:
        if tensor:
            yield f"the description of {tensor} says", plain(specs[tensor].description)
    yield "the docstring of its reference says", plain(docstring(definition))


def docstring(definition: Definition) -> str:
    """The prose of a reference: of its module and of run()."""
    tree = ast.parse(definition.reference)
    run = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run"]
    return " ".join((ast.get_docstring(tree) or "", *(ast.get_docstring(n) or "" for n in run)))


def said(definition: Definition, rules: Rules, *tensors: str,
         convention: Any = None) -> Statement | None:
    """Return what the text says, else the schema's convention; None where both are silent. A text
    that speaks of several values compares them: it counts where no other text is plain."""
    found: list[tuple[str, Any]] = []
    compared: list[tuple[str, Any]] = []
    for source, text in texts(definition, *tensors):
        hits = _hits(text, rules)
        if hits:
            several = len({value for _, value in hits}) > 1
            (compared if several else found).append((source, min(hits, key=lambda h: h[0])[1]))
    if found or compared or convention is None:
        return _first(found or compared)
    return Statement(convention, "by the schema's convention it is")


def _hits(text: str, rules: Rules) -> list[tuple[int, Any]]:
    """(where, value) of the rules that match; "not causal" is no hit of "causal" after it."""
    hits = []
    for pattern, value in rules:
        match = re.search(pattern, text)
        if match:
            hits.append((match.start(), value))
            text = re.sub(pattern, lambda m: " " * len(m[0]), text)
    return hits


def number_said(definition: Definition, pattern: str, *tensors: str,
                kind: type[int] | type[float] = int) -> Statement | None:
    """The number that the first group of a pattern finds in the text."""
    found = [(source, kind(match[1])) for source, text in texts(definition, *tensors)
             if (match := re.search(pattern, text))]
    return _first(found)


def _first(found: Sequence[tuple[str, Any]]) -> Statement | None:
    """The first of (who says, what), and who else of the schema's text says otherwise."""
    if not found:
        return None
    source, value = found[0]
    return Statement(value, source, next((f for f in found[1:] if f[1] != value
                                          and not f[0].startswith("the docstring")), None))


def first_choice(statement: Statement | None, *values: Any) -> tuple[Any, ...]:
    """The stated value, then the others in their order, each once."""
    stated = () if statement is None else (statement.value,)
    return tuple(dict.fromkeys((*stated, *values)))


# Numbers in the reference.

def named_number(definition: Definition, pattern: str) -> float | None:
    """The number that a const axis, or the reference, gives a name such as LOGITS_SOFT_CAP."""
    for axis, value in definition.const_axes.items():
        if re.fullmatch(pattern, axis.lower()):
            return value
    for node in ast.walk(ast.parse(definition.reference)):
        if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and re.fullmatch(pattern, t.id.lower())
                for t in node.targets):
            number = _number(node.value)
            if number is not None:
                return number
    return None


def _number(node: ast.expr) -> float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def identifiers(definition: Definition) -> set[str]:
    """The names in the reference's code, in lower case: no comments, no texts."""
    tree = ast.parse(definition.reference)
    return {name.lower() for node in ast.walk(tree)
            for name in (getattr(node, "id", None), getattr(node, "attr", None),
                         getattr(node, "arg", None)) if isinstance(name, str)}


def mentions(definition: Definition, pattern: str) -> str:
    """Who speaks of it, not to say that it is absent: text, or a name in the reference."""
    absent = rf"(no|not|without|without a|without any)[ -]({pattern})"
    for source, text in texts(definition):
        if re.search(pattern, re.sub(absent, "", text)):
            return source.rpartition(" ")[0]
    return ("its reference" if any(re.search(pattern, plain(n)) for n in identifiers(definition))
            else "")


# Options of attention that are no inputs.

def window_left(definition: Definition) -> tuple[Statement | None, tuple[int, ...]]:
    """What the text says of a sliding window, as keys left of the query, and the values that it
    may have. A window of n keys has the query's own among them, unless its name says left."""
    said_left = (number_said(definition, r"window left ?(?:=|:|of|is)? ?(\d+)")
                 or number_said(definition, r"window[^.;]*?\b(\d+) (?:keys |tokens )?to the left"))
    size = None if said_left else number_said(
        definition, r"window(?: attention)?(?: size| length)? ?(?:=|:|of|is)? ?(\d+)"
    ) or number_said(definition, r"(\d+)[ -](?:tokens? |keys? )?(?:sliding[ -])?window")
    statement = said_left or (size and Statement(size.value - 1, size.source, size.otherwise and (
        size.otherwise[0], size.otherwise[1] - 1)))
    left = named_number(definition, r"(sliding_)?window_left")
    width = named_number(definition, r"(sliding_)?window(_size|_len)?")
    values = [int(n) for n in (left, *(() if width is None else (width - 1, width)))
              if n is not None] + ([-1] if statement else [])
    return statement, first_choice(statement, *values)


def softcap(definition: Definition) -> tuple[Statement | None, tuple[float, ...]]:
    """What the text says of a cap on the logits, and the values that it may have."""
    statement = number_said(
        definition, r"soft[ -]?cap(?:ped|ping)?(?: at| of| to| with)? ?[=:]? ?(\d+(?:\.\d+)?)",
        kind=float)
    named = named_number(definition, r".*soft_?cap.*")
    values = [float(n) for n in (named, *_tanh_caps(definition), 0.0 if statement else None)
              if n is not None]
    return statement, first_choice(statement, *values)


def _tanh_caps(definition: Definition) -> list[float]:
    """The numbers c of c * tanh(x / c)."""
    caps = []
    for node in ast.walk(ast.parse(definition.reference)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            inner = ast.unparse(node)
            for side in (node.left, node.right):
                cap = _number(side)
                if cap is not None and re.search(rf"tanh\(.*/ {re.escape(str(cap))}\)", inner):
                    caps.append(float(cap))
    return caps


WORDS: Mapping[tuple[str, Any], str] = {
    ("is_causal", True): "causal", ("is_causal", False): "not causal",
    ("lse_base", "2"): "lse of base 2", ("lse_base", "e"): "natural lse",
    ("gate_first", True): "gate before up", ("gate_first", False): "up before gate",
    ("normalize", True): "renormalised", ("normalize", False): "not renormalised",
    ("weight_on", "input"): "routing weights on the input",
    ("weight_on", "output"): "routing weights on the output",
    ("bias", "choice"): "a bias for the choice of experts", ("bias", "ignored"): "bias ignored",
    ("style", "rotate_half"): "rotate_half (NeoX)", ("style", "interleaved"): "interleaved (GPT-J)",
    ("offset", 1.0): "1 + weight", ("offset", 0.0): "weight as it is",
    ("softplus", True): "softplus of dt", ("softplus", False): "dt without softplus",
    ("l2norm", True): "q and k L2-normalised", ("l2norm", False): "q and k as they are",
    ("pool", "kept"): "states kept", ("pool", "updated"): "states updated"}


def words(option: str, value: Any) -> str:
    """The value of an option in words."""
    if option == "groups":
        return f"n_group {value[0]}, topk_group {value[1]}"
    if value == {"window_left": -1, "softcap": 0.0}.get(option):
        return f"no {option}"
    try:
        return WORDS[option, value]
    except (KeyError, TypeError):
        return f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}"


def contradictions(reading: Mapping[str, Any],
                   statements: Mapping[str, Statement]) -> tuple[str, ...]:
    """One sentence for each option that is read otherwise than stated."""
    return tuple(f"{s.source} {words(option, s.value)}, its reference agrees only with "
                 f"{words(option, reading[option])}"
                 for option, s in statements.items()
                 if option in reading and reading[option] != s.value)


def disagreements(reading: Mapping[str, Any],
                  statements: Mapping[str, Statement]) -> tuple[str, ...]:
    """One sentence for each option on which name, tags and description differ."""
    return tuple(f"{s.source} {words(option, s.value)}, {s.otherwise[0]} "
                 f"{words(option, s.otherwise[1])}"
                 for option, s in statements.items()
                 if option in reading and s.otherwise is not None)
