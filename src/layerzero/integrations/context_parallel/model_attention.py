"""A model of transformers over a sharded sequence: `attn_implementation` of one's own name.

    name = register_context_parallel(group)
    model.set_attn_implementation(name)
    model(**shard_batch(batch, group))         # this rank's tokens, with their position_ids

Packed sequences (batch 1) say where they begin as they do to flash attention: `cu_seq_lens_q`,
the local boundaries, and `max_length_q`.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from ...spec.errors import ConfigError
from .methods import METHODS
from .ranks import Ranks, ranks_of
from .sharding import shard_indices
from .torch_context import batched

NAME = "layerzero_context_parallel"
_CHECKED = "_layerzero_zigzag"                 # of position_ids: they are as they should be


def register_context_parallel(
    group: Any = None, method: Literal["zigzag", "ring", "ulysses"] = "zigzag",
    heads_k_stride: int = 1, name: str = NAME,
) -> str:
    """Makes an attention implementation known to transformers that shards sequences over `group`,
    and returns its name. Registering a name again replaces it."""
    ranks = ranks_of(group)
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as e:
        raise ConfigError(f"attn_implementation={name!r} wants transformers 5: {e}; "
                          "pip install 'layerzero[transformers]'") from e
    options: dict[str, Any] = {"group": ranks}
    if method == "zigzag":
        options["heads_k_stride"] = heads_k_stride

    def attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
        sliding_window: int | None = None, softcap: float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:
        for argument in ("s_aux", "position_bias", "indices", "block_indices", "cache"):
            if kwargs.get(argument) is not None:
                raise ConfigError(f"attn_implementation={name!r} does not serve {argument}=, which "
                                  "this model asks for")
        if attention_mask is not None or dropout:
            raise ConfigError(f"attn_implementation={name!r} serves no masks of one's own and no "
                              "dropout; set attention_dropout to 0 in the model's configuration")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        call = {**options, "is_causal": bool(causal), "scale": scaling, "softcap": softcap or 0.0}
        if sliding_window is not None:
            if method == "ring":
                raise ConfigError(f"attn_implementation={name!r} has no sliding windows in a ring; "
                                  "register it with method='zigzag'")
            call["window_left"] = sliding_window - 1
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None:
            _check_positions(kwargs.get("position_ids"), ranks)
            return batched(method, query, key, value, **call), None
        if query.shape[0] != 1:
            raise ConfigError(f"cu_seq_lens_q says where packed sequences begin, in a batch of 1, "
                              f"got {query.shape[0]}")
        packed = (t[0].transpose(0, 1) for t in (query, key, value))
        out = METHODS[method](*packed, cu_seqlens, kwargs.get("max_length_q"), **call)
        return out[None], None

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, _no_mask)
    return name


def _no_mask(**arguments: Any) -> None:
    """No mask is made: a rank's tokens are not neighbours, and causality and windows are known by
    their places. What else a mask would hide is refused."""
    from ..transformers.masks import is_plain

    padding = arguments.get("attention_mask")
    if padding is not None and not bool(padding.all()):
        raise ConfigError("attention_mask hides tokens, and padding cannot be sharded; pack the "
                          "sequences and pass their local boundaries as cu_seq_lens_q")
    if not is_plain(arguments["mask_function"]):
        raise ConfigError("this model's mask is neither causal nor a sliding window nor full, and "
                          "cannot be sharded")


def _check_positions(positions: Any, ranks: Ranks) -> None:
    """Raises unless the tokens are where zigzag puts those of one sequence per row: with others the
    model would give plausible nonsense. Looks once at each tensor."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or hasattr(positions, _CHECKED):
        return
    whole = [0, positions.shape[1] * ranks.size]
    expected = shard_indices(whole, ranks.local[0], ranks.size).to(positions.device)
    if not bool((positions == expected).all()):
        raise ConfigError(
            "position_ids must be those of this rank's tokens in zigzag: shard_batch makes them, "
            "shard_positions those of packed sequences, which also want cu_seq_lens_q")
    setattr(positions, _CHECKED, True)
