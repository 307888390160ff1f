"""The families of models that the decode step was written for. A module is recognised by the code
of its `forward`, not by its name.

The body of a `forward` is compared with those of the families below, as they are installed. So a
model that was copied from one of them is served too, and one that has the same module names but
another formula is left alone. What a known forward does is then read from the names in it: one that
names a softcap has one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

from ..replacements import stock_of

# Folder of the family in transformers -> what its classes begin with.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
            "phi3": "Phi3", "gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3",
            "mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe",
            "qwen3_moe": "Qwen3Moe", "gpt2": "GPT2", "phi": "Phi", "gpt_neox": "GPTNeoX",
            "cohere": "Cohere", "cohere2": "Cohere2", "ernie4_5": "Ernie4_5", "exaone4": "Exaone4",
            "falcon": "Falcon", "glm": "Glm", "glm4": "Glm4", "granite": "Granite",
            "ministral": "Ministral", "olmo2": "Olmo2", "olmo3": "Olmo3",
            "olmoe": "Olmoe", "opt": "OPT", "gpt_bigcode": "GPTBigCode", "seed_oss": "SeedOss",
            "smollm3": "SmolLM3", "stablelm": "StableLm", "starcoder2": "Starcoder2", "cwm": "Cwm",
            "mellum": "Mellum", "flex_olmo": "FlexOlmo",
            "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VLText",
            "qwen3_vl_moe": "Qwen3VLMoeText",
            "glm4_moe": "Glm4Moe", "dots1": "Dots1", "ernie4_5_moe": "Ernie4_5_Moe",
            "hunyuan_v1_dense": "HunYuanDenseV1", "hunyuan_v1_moe": "HunYuanMoEV1",
            "solar_open": "SolarOpen", "minimax_m2": "MiniMaxM2", "exaone_moe": "ExaoneMoe",
            "kolibri1": "Kolibri1", "apertus": "Apertus", "olmo": "Olmo", "nemotron": "Nemotron",
            "vaultgemma": "VaultGemma", "hyperclovax": "HyperCLOVAX", "bitnet": "BitNet",
            "granitemoe": "GraniteMoe", "ministral3": "Ministral3", "gpt_oss": "GptOss",
            "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3",
            "glm4_moe_lite": "Glm4MoeLite", "youtu": "Youtu", "minicpm3": "MiniCPM3",
            "bloom": "Bloom", "mpt": "Mpt",
            # decoders of an encoder
            "whisper": "Whisper", "bart": "Bart", "mbart": "MBart", "t5": "T5",
            "moonshine": "Moonshine", "musicgen": "Musicgen", "pegasus": "Pegasus",
            "marian": "Marian", "blenderbot": "Blenderbot"}
# Role -> what its class ends with, the first that there is.
ROLES = {"head": ("ForCausalLM", "LMHeadModel"),
         "decoder": ("TextModel", "Decoder", "Stack", "Model"),
         "layer": ("DecoderLayer", "Layer", "Block"), "attention": ("Attention",),
         "rotary": ("RotaryEmbedding",),
         "scaled embedding": ("TextScaledWordEmbedding", "ScaledWordEmbedding"),
         "mixture of experts": ("SparseMoeBlock", "SparseMoEBlock", "MoE", "Moe"),
         "router": ("TopKRouter", "TopkRouter", "Gate"),
         "norm of each head": ("LayerNormPerHead", "LayerNorm"),
         "learned positions": ("LearnedPositionalEmbedding", "PositionalEmbedding",
                               "SinusoidalPositionalEmbedding"),
         "sinusoidal positions": ("SinusoidalPositionalEmbedding",),
         "self-attention of a layer": ("LayerSelfAttention",),
         "cross-attention of a layer": ("LayerCrossAttention",),
         "feed-forward of a layer": ("LayerFF",), "feed-forward that adds": ("MLP",),
         "feed-forward, gate last": ("DecoderMLP",)}


class NotRecognised(Exception):
    """The model, or its state, is none that the decode step serves; the text says what it is."""


@dataclass(frozen=True)
class FunctionCode:
    """The code of a function: parameters and body, without annotations and documentation."""

    text: str
    # everything that is named in it, keyword arguments too
    names: frozenset[str]
    # the class of what it returns, where it makes that in the last line
    returned: Any
    # `self.name(...)`, in the order of the source
    calls: tuple[str, ...]
    # those that return a tuple: `x, _ = self.name(...)`
    unpacked: frozenset[str]
    # the condition, on `self`, under which it rotates queries and keys; None: always
    rotates_if: CodeType | None

    def rotates(self, module: Any) -> bool:
        """Does the layer use rope? Some models do in layers with a window, or in three of four."""
        # models with alibi have a bias instead; cross-attention is not rotated
        names = {"self": module, "alibi": None, "is_cross_attention": False}
        # an expression of its own source
        return self.rotates_if is None or bool(eval(self.rotates_if, names))


def known(module: Any, role: str) -> FunctionCode:
    """Returns the code of a module that plays this role in one of the families."""
    if not is_known(module, role):
        raise NotRecognised(
            f"{type(module).__name__} does not do what the {role} does in any family that is known")
    return code_of(module)


def is_known(module: Any, role: str) -> bool:
    if not isinstance(module, nn.Module):
        return False
    kind = stock_of(module)
    family = kind.__module__.removeprefix("transformers.models.").split(".")[0]
    if family in FAMILIES:                       # one of theirs: the others need not be imported
        return kind is _class(family, role)
    return code_of(module).text in _references().get(role, ())


def code_of(module: nn.Module) -> FunctionCode:
    """Returns the code of its class's own forward, whether or not the module is patched."""
    kind: Any = stock_of(module)
    return _code(kind.forward)


@lru_cache(maxsize=1)
def _references() -> dict[str, set[str]]:
    """Role -> the code of its forward in each family."""
    references: dict[str, set[str]] = {}
    for folder in FAMILIES:
        for role in ROLES:
            kind = _class(folder, role)
            if kind is not None:
                references.setdefault(role, set()).add(_code(kind.forward).text)
    return references


def _class(folder: str, role: str) -> Any:
    try:
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ImportError:                        # a release that has no such family
        return None
    names = (FAMILIES[folder] + ending for ending in ROLES[role])
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


@lru_cache(maxsize=1024)
def _code(function: Any) -> FunctionCode:
    plain = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain))).body[0]
    except (OSError, TypeError, SyntaxError):
        return FunctionCode(f"no source: {plain!r}", frozenset(), None, (), frozenset(), None)
    if not isinstance(tree, ast.FunctionDef):
        return FunctionCode(f"no function: {plain!r}", frozenset(), None, (), frozenset(), None)
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    parameters = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
    text = f"{parameters[1:]} {[ast.dump(node) for node in body]}"
    return FunctionCode(text, frozenset(name for part in body for node in ast.walk(part)
                                        for name in _named(node)),
                _returned_function(body[-1], getattr(plain, "__globals__", {})), _calls(body),
                _unpacked_calls(body), _rotation_condition(body))


def _named(node: ast.AST) -> tuple[str, ...]:
    """Returns the names that code uses: `x.name`, `name`, `name=`, and "name" as of getattr."""
    name = getattr(node, {ast.Attribute: "attr", ast.Name: "id", ast.keyword: "arg",
                           ast.Constant: "value"}.get(
        type(node), ""), None)
    return (name,) if isinstance(name, str) else ()


def _returned_function(last: ast.stmt, names: dict[str, Any]) -> Any:
    call = last.value if isinstance(last, ast.Return) else None
    return (names.get(call.func.id) if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name) else None)


def _calls(body: list[ast.stmt]) -> tuple[str, ...]:
    called = [node.func for part in body for node in ast.walk(part) if isinstance(node, ast.Call)]
    own = [f for f in called if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name)
           and f.value.id == "self"]
    return tuple(f.attr for f in sorted(own, key=lambda f: (f.lineno, f.col_offset)))


def _unpacked_calls(body: list[ast.stmt]) -> frozenset[str]:
    values = [node.value for part in body for node in ast.walk(part)
             if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)]
    return frozenset(call.func.attr for call in values if isinstance(call, ast.Call)
                     and isinstance(call.func, ast.Attribute))


def _rotation_condition(body: list[ast.stmt]) -> CodeType | None:
    for node in (node for part in body for node in ast.walk(part)):
        inside = ((n for part in getattr(node, "body", ()) for n in ast.walk(part))
                  if isinstance(node, ast.If) else ())
        if isinstance(node, ast.If) and any("apply_rotary_pos_emb" in _named(n) for n in inside):
            return compile(ast.Expression(node.test), "<forward>", "eval")
    return None
