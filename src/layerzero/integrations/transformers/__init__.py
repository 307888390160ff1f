"""transformers: `attn_implementation="layerzero"`.

    import layerzero as lz
    lz.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="layerzero")
    other.set_attn_implementation("layerzero")
"""

from __future__ import annotations

from ...spec.errors import ConfigError

NAME = "layerzero"
ACCELERATION = "_layerzero_acceleration"         # where a model keeps what lz.accelerate did to it


def register() -> None:
    """Make `attn_implementation="layerzero"` known to transformers.

    Calling it again changes nothing.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as e:
        raise ConfigError(f"attn_implementation={NAME!r} wants transformers 5: {e}; "
                          "pip install 'layerzero[transformers]'") from e
    from .attention import attention_forward
    from .masks import attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
