"""What people call kernels and libraries, resolved in one place.

`backend=`, lz.prefer, lz.lock, policy files, environment variables and the options of `lz` all take
a kernel id ("torch.sdpa_math"), a pattern of ids ("torch.*"), a library ("flash_attn"), and the
names that pip, transformers, diffusers and vLLM have for the same ("flash-attn", "sdpa").
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from .errors import ConfigError

OpOfKernel = Mapping[str, str]                 # kernel id -> name of its op

# patterns of kernel ids -> other names for them; case, "-", "_" and spaces make no difference
_OTHER_NAMES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("flash_attn.*",): ("flash-attn", "flash_attention", "flash"),
    ("flash_attn.v2*",): ("flash_attention_2", "flash_attn_2", "fa2"),
    ("flash_attn.v3*",): ("flash_attention_3", "flash_attn_3", "flash_attn_interface", "fa3"),
    ("flash_attn.v4*",): ("flash_attention_4", "flash_attn_4", "fa4"),
    ("flashinfer.*",): ("flashinfer-python",),
    ("aiter.*",): ("amd-aiter",),
    ("habana.*",): ("habana-torch-plugin", "habana_frameworks"),
    ("liger.*",): ("liger-kernel",),
    ("quack.*",): ("quack-kernels",),
    ("xformers.*",): ("memory_efficient_attention",),
    ("ipex.*", "xpu.ipex_*"): ("intel-extension-for-pytorch", "intel_extension_for_pytorch"),
    ("tokenizers.*",): ("hf-tokenizers", "huggingface-tokenizers"),
    ("torch.*",): ("pytorch",),
    ("torch.sdpa", "torch.sdpa_bias"): ("sdpa", "torch_sdpa", "scaled_dot_product_attention"),
    ("torch.sdpa_math",): ("math",),
    ("torch.sdpa_efficient*",): ("efficient_attention", "mem_efficient"),
    ("torch.sdpa_cudnn*",): ("cudnn_attention", "cudnn"),
    ("torch.flex",): ("flex_attention", "flex"),
    ("torch.compiled_*",): ("inductor",),
    ("reference.*",): ("eager",),
}
ALIASES: Mapping[str, tuple[str, ...]] = {
    name: patterns for patterns, names in _OTHER_NAMES.items() for name in names}
_WILD = re.compile(r"[*?\[]")
_MAX_SHOWN = 3                                 # kernels that a suggestion names


def is_pattern(text: str) -> bool:
    return _WILD.search(text) is not None


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Returns the known word that is most like this one; "" if none is."""
    return next(iter(difflib.get_close_matches(word[:100], sorted(known), 1, likeness)), "")


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: the nearest known word, or all of them."""
    options = sorted(known)
    near = nearest(word, options)
    return f"; did you mean {near!r}?" if near else f"; known are {', '.join(options)}"


@lru_cache(maxsize=256)
def kernel_patterns(name: str) -> tuple[str, ...]:
    """Returns the patterns over kernel ids that a name stands for, if any exist or not."""
    word = name.strip().lower()
    if is_pattern(word) or not word:
        return (word,)
    word = re.sub(r"[-\s]", "_", word)
    return (word,) if "." in word else _BY_SQUASHED.get(_squash(word)) or (f"{word}.*",)


def names_kernel(name: str, kernel: str) -> bool:
    """Returns whether the kernel with this id is one of those that `name` stands for."""
    return any(fnmatchcase(kernel, pattern) for pattern in kernel_patterns(name))


def find_kernels(name: str, kernels: OpOfKernel, op: str = "*", what: str = "") -> tuple[str, ...]:
    """Returns the ids of the kernels of `op` (a name or pattern) that `name` stands for.

    ConfigError with the nearest names if there is none; it begins with `what`, such as the option.
    """
    matches = tuple(k for k, of in kernels.items() if fnmatchcase(of, op) and names_kernel(name, k))
    if not matches:
        raise ConfigError(f"{what}{': ' if what else ''}{unknown_kernel(name, kernels, op)}")
    return matches


def find_kernel(name: str, kernels: OpOfKernel, op: str = "*", what: str = "") -> str:
    """Returns the one kernel id of `op` that `name` stands for; ConfigError if not one."""
    matches = find_kernels(name, kernels, op, what)
    exact = [pattern for pattern in kernel_patterns(name) if pattern in matches]
    if len(matches) > 1 and not exact:
        raise ConfigError(f"{what}{': ' if what else ''}{name!r} stands for {len(matches)} "
                          f"kernels; give one of them: {', '.join(matches)}")
    return (exact or matches)[0]


def unknown_kernel(name: str, kernels: OpOfKernel, op: str = "*") -> str:
    """Returns the sentence about a name that is no kernel of `op`: what is near, where to look."""
    of_this_op = {k: of for k, of in kernels.items() if fnmatchcase(of, op)}
    of_op = "" if is_pattern(op) else f" of lz.{op}"
    text = f"no kernel{of_op} is called {name.removesuffix('.*')[:100]!r}"
    if elsewhere := sorted({f"lz.{of}" for k, of in kernels.items() if names_kernel(name, k)}):
        text += f", only of {', '.join(elsewhere)}"
    elif near := _near(name, of_this_op):
        return f"{text}; did you mean {' or '.join(map(repr, near))}?"
    libraries = ", ".join(_libraries(of_this_op)) or "no library"
    return (f"{text}; there are kernels of {libraries}: "
            f"lz list{'' if is_pattern(op) else f' {op}'} shows them")


def _near(name: str, kernels: OpOfKernel) -> list[str]:
    """Returns the kernels, libraries and names that may have been meant, likeliest first."""
    word = re.sub(r"\.\*$", "", name.strip().lower().replace("-", "_"))[:100]
    same_name = [k for k in kernels if k.partition(".")[2] == word]
    if same_name:
        return same_name[:_MAX_SHOWN]
    known = [*kernels, *_libraries(kernels),
             *(n for n in ALIASES if any(names_kernel(n, k) for k in kernels))]
    squashed = [n for n in known if _squash(n) == _squash(word)]
    near = nearest(word, known)
    last_part = nearest(word.rpartition(".")[2], {k.partition(".")[2] for k in kernels}, 0.75)
    same_last = [k for k in kernels if last_part and k.partition(".")[2] == last_part]
    return (squashed or ([near] if near else same_last))[:_MAX_SHOWN]


def _libraries(kernels: OpOfKernel) -> list[str]:
    return sorted({k.partition(".")[0] for k in kernels})


def _squash(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())


_BY_SQUASHED = {_squash(name): patterns for name, patterns in ALIASES.items()}
