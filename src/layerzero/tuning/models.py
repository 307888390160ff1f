"""Public models as data, and the calls that one step of each makes.

`calls_of("llama-3-8b")` is every lz operation of one prefill and of one decode step, with its
shapes and strides; `count` says how often the step makes it. Layers of equal shapes are one call.
What is no operation of ours (convolutions, residual sums, resnets) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..spec.call import MAX_VALUES, Call, Scalar, TensorSpec
from ..spec.errors import ConfigError
from ..spec.names import suggest

PAGE = 64                                      # tokens in one page of a latent cache


@dataclass(frozen=True)
class Level:
    """One resolution of a UNet: image tokens, width, and its number of transformer blocks."""

    tokens: int
    channels: int
    heads: int
    blocks: int
    inputs: int                                # how many of the blocks begin with a group norm


@dataclass(frozen=True)
class Model:
    """The sizes of a model, as its published configuration states them."""

    name: str
    kind: str                                  # decoder | encoder | encoder-decoder | unet | dit
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 0                             # or classes
    norm: str = "rms"                          # rms | layer
    eps: float = 1e-5
    norm_offset: float = 0.0                   # Gemma stores norm weights minus 1
    norms: int = 2                             # of each layer
    affine: bool = True
    activation: str = "swiglu"
    bias: bool = False
    rope: str = "rotate_half"                  # or interleaved; "": positions are learned
    qk_norm: bool = False
    window: int = 0                            # 0: full attention in every layer
    # of a model with a window: layers with full attention
    full_layers: int = 0
    softcap: float = 0.0
    scale: float | None = None
    tokens: int = 0                            # of one image; 0: as long as the prompt
    text_tokens: int = 0                       # beside the image, or the keys of cross attention
    text_width: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0                      # of a mixture: layers without experts
    routing: Mapping[str, Any] = field(default_factory=dict)
    # latent attention: width of the compressed query, 0 for none
    q_rank: int = 0
    # width of the compressed keys and values, 0: ordinary attention
    kv_rank: int = 0
    rope_dim: int = 0                          # the part of each head that carries the position
    value_dim: int = 0
    single_layers: int = 0                     # Flux: layers with one stream
    levels: tuple[Level, ...] = ()


def _rows() -> tuple[Model, ...]:
    llama = Model("", "decoder", head_dim=128)
    qwen = replace(llama, eps=1e-6, qk_norm=True, vocab=151936, kv_heads=8)
    gemma = replace(llama, eps=1e-6, norm_offset=1.0, norms=4, activation="geglu_tanh",
                    head_dim=256)
    deepseek = Model("", "decoder", eps=1e-6, kv_rank=512, rope_dim=64, head_dim=192, value_dim=128,
                     rope="interleaved")
    bert = Model("", "encoder", 12, 768, 12, 12, 64, 3072, norm="layer", activation="gelu",
                 bias=True, rope="")
    return (
        replace(llama, name="llama-3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336,
                vocab=128256),
        replace(llama, name="llama-3.1-70b", layers=80, hidden=8192, heads=64, kv_heads=8,
                ffn=28672, vocab=128256),
        replace(llama, name="llama-3.2-1b", layers=16, hidden=2048, heads=32, kv_heads=8,
                head_dim=64, ffn=8192, vocab=128256),
        replace(qwen, name="qwen3-0.6b", layers=28, hidden=1024, heads=16, ffn=3072),
        replace(qwen, name="qwen3-8b", layers=36, hidden=4096, heads=32, ffn=12288),
        replace(qwen, name="qwen3-30b-a3b", layers=48, hidden=2048, heads=32, kv_heads=4,
                experts=128, experts_per_token=8, expert_ffn=768),
        replace(llama, name="mistral-7b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336,
                vocab=32000, window=4096),
        replace(gemma, name="gemma-2-9b", layers=42, hidden=3584, heads=16, kv_heads=8, ffn=14336,
                vocab=256000, window=4096, full_layers=21, softcap=50.0),
        replace(gemma, name="gemma-3-1b", layers=26, hidden=1152, heads=4, kv_heads=1, ffn=6912,
                vocab=262144, window=512, full_layers=4, qk_norm=True),
        replace(llama, name="phi-3-mini", layers=32, hidden=3072, heads=32, kv_heads=32,
                head_dim=96, ffn=8192,
                vocab=32064, window=2047),
        replace(llama, name="smollm2-135m", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64,
                ffn=1536, vocab=49152),
        replace(llama, name="mixtral-8x7b", layers=32, hidden=4096, heads=32, kv_heads=8,
                vocab=32000, experts=8, experts_per_token=2, expert_ffn=14336),
        replace(deepseek, name="deepseek-v2-lite", layers=27, hidden=2048, heads=16, kv_heads=16,
                ffn=10944, vocab=102400, experts=64, experts_per_token=6, expert_ffn=1408,
                shared_experts=2, dense_layers=1, routing={"normalize": False}),
        replace(deepseek, name="deepseek-v3", layers=61, hidden=7168, heads=128, kv_heads=128,
                ffn=18432, vocab=129280, experts=256, experts_per_token=8, expert_ffn=2048,
                shared_experts=1, dense_layers=3, q_rank=1536,
                routing={"scoring": "sigmoid", "n_group": 8, "topk_group": 4,
                                      "routed_scaling_factor": 2.5}),
        Model("gpt2", "decoder", 12, 768, 12, 12, 64, 3072, 50257, norm="layer",
              activation="gelu_tanh", bias=True, rope=""),
        Model("t5-base", "encoder-decoder", 12, 768, 12, 12, 64, 3072, 32128, eps=1e-6,
              activation="relu", rope="", scale=1.0),
        replace(bert, name="bert-base", vocab=30522, eps=1e-12),
        replace(bert, name="vit-base-16", tokens=197, vocab=1000, eps=1e-12),
        Model("sd-1.5", "unet", activation="geglu", rope="", text_tokens=77, text_width=768,
              levels=(
            Level(4096, 320, 8, 5, 5), Level(1024, 640, 8, 5, 5), Level(256, 1280, 8, 5, 5),
            Level(64, 1280, 8, 1, 1))),
        Model("sdxl", "unet", activation="geglu", rope="", text_tokens=77, text_width=2048, levels=(
            Level(4096, 640, 10, 10, 5), Level(1024, 1280, 20, 60, 6))),
        Model("dit-xl-2", "dit", 28, 1152, 16, 16, 72, 4608, norm="layer", eps=1e-6, affine=False,
              activation="gelu_tanh", bias=True, rope="", tokens=256),
        Model("flux-1-dev", "dit", 19, 3072, 24, 24, 128, 12288, norm="layer", eps=1e-6,
              affine=False, activation="gelu_tanh", bias=True, rope="interleaved", qk_norm=True,
              tokens=4096, text_tokens=512, single_layers=38),
    )


MODELS: Mapping[str, Model] = {model.name: model for model in _rows()}


def model_named(name: str) -> Model:
    if name not in MODELS:
        raise ConfigError(f"there is no model {name!r}{suggest(name, MODELS)}")
    return MODELS[name]


def calls_of(model: str | Model, *, batch: int = 1, prompt: int = 512, context: int = 4096,
             dtype: str = "bfloat16", decode: bool = True, prefill: bool = True,
             scale: float = 1.0) -> tuple[Call, ...]:
    """Return the calls of one prefill over `prompt` tokens, and of one decode step after `context`
    tokens.

    `scale` makes the model narrower (its heads, widths, vocabulary and experts, and the tokens of
    an image) and keeps what kernels depend on: the size of a head, how many heads share keys, the
    shape of a layer.
    """
    for name, value in (("batch", batch), ("prompt", prompt), ("context", context)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 < scale <= 1:
        raise ConfigError(f"scale must be above 0 and at most 1, got {scale}")
    scaled = _scale(model_named(model) if isinstance(model, str) else model, scale)
    calls: tuple[Call, ...] = ()
    tokens = scaled.tokens or prompt
    if prefill:
        calls += _BUILDERS[scaled.kind](_Step(scaled, dtype, batch, tokens, tokens, "prefill"))
    if decode and scaled.kind in ("decoder", "encoder-decoder"):
        calls += _BUILDERS[scaled.kind](_Step(scaled, dtype, batch, 1, context, "decode", prompt))
    if not calls:
        raise ConfigError(
            f"{scaled.name} makes no call: it has {'no decode' if decode else 'a decode'} step; "
            "ask for prefill as well")
    return calls


def _scale(model: Model, scale: float) -> Model:
    if scale == 1.0:
        return model

    def part(n: int, unit: int = 1) -> int:
        return max(round(n * scale / unit), 1) * unit if n else 0

    kv_heads = part(model.kv_heads)
    heads = kv_heads * (model.heads // model.kv_heads) if model.kv_heads else 0
    experts = max(part(model.experts, model.routing.get("n_group", 1)), 2 * model.experts_per_token)
    levels = tuple(replace(level, tokens=max(part(level.tokens, 16), 16), heads=part(level.heads),
                           channels=part(level.heads) * (level.channels // level.heads))
                   for level in model.levels)
    return replace(
        model, hidden=part(model.hidden, 64), heads=heads, kv_heads=kv_heads,
        ffn=part(model.ffn, 64), vocab=part(model.vocab, 32), tokens=part(model.tokens),
        text_width=part(model.text_width, 64), experts=experts,
        expert_ffn=part(model.expert_ffn, 64), q_rank=part(model.q_rank, 64),
        kv_rank=part(model.kv_rank, 64), levels=levels)


class _Step:
    """Collects the calls of one step: `tokens` new ones per row, which attend to `seen`."""

    def __init__(self, model: Model, dtype: str, batch: int, tokens: int, seen: int, phase: str,
                 prompt: int = 0) -> None:
        self.model, self.dtype, self.batch, self.tokens, self.seen = (model, dtype, batch, tokens,
                                                                      seen)
        self.decoding, self.prompt = phase == "decode", prompt
        image = model.tokens or model.levels
        self.name = f"{model.name} image" if image else f"{model.name} {phase} {seen}"
        self.calls: list[Call] = []

    def add(self, op: str, count: int, **arguments: TensorSpec | Scalar) -> None:
        if count:
            present = {n: v for n, v in arguments.items() if v is not None}
            self.calls.append(Call(op, present, count=count, name=self.name))

    def tensor(self, *shape: int, dtype: str = "") -> TensorSpec:
        return TensorSpec(shape, dtype or self.dtype)

    def optional(self, present: bool, *shape: int) -> TensorSpec | None:
        return self.tensor(*shape) if present else None

    def integers(self, values: list[int], *shape: int, dtype: str = "int64") -> TensorSpec:
        return TensorSpec(shape, dtype, values=tuple(values))

    def heads(self, heads: int, tokens: int, dim: int, transposed: bool) -> TensorSpec:
        """Return (batch, heads, tokens, dim); `transposed`: a view of a projection's output."""
        shape, strides = (self.batch, heads, tokens, dim), (tokens * heads * dim, dim, heads * dim,
                                                            1)
        return TensorSpec(shape, self.dtype, strides if transposed and heads > 1 and tokens > 1
                          else None)

    # the parts of a layer

    def linear(self, count: int, width: int, out: int, tokens: int = 0,
               bias: bool | None = None) -> None:
        bias = self.model.bias if bias is None else bias
        self.add("linear", count, x=self.tensor(self.batch, tokens or self.tokens, width),
                 weight=self.tensor(out, width), bias=self.optional(bias, out))

    def norm(self, count: int, width: int, tokens: int = 0) -> None:
        m, x = self.model, self.tensor(self.batch, tokens or self.tokens, width)
        if m.norm == "layer":
            self.add("layer_norm", count, x=x, weight=self.optional(m.affine, width),
                     bias=self.optional(m.affine, width), eps=m.eps)
        else:
            self.add("rms_norm", count, x=x, weight=self.tensor(width), eps=m.eps,
                     offset=m.norm_offset or None)

    def norms(self) -> None:
        """Add the norms of all layers and the last, fused with the residual add if possible."""
        m, count = self.model, self.model.norms * self.model.layers
        if m.norm == "layer" or m.norms != 2:
            self.norm(count + 1, m.hidden)
            return
        x = self.tensor(self.batch, self.tokens, m.hidden)
        self.norm(1, m.hidden)
        self.add("add_rms_norm", count, x=x, residual=x, weight=self.tensor(m.hidden), eps=m.eps)

    def head_norm(self, count: int, heads: int, tokens: int) -> None:
        if self.model.qk_norm:
            self.add("rms_norm", count,
                     x=self.tensor(self.batch, tokens, heads, self.model.head_dim),
                     weight=self.tensor(self.model.head_dim), eps=self.model.eps,
                     offset=self.model.norm_offset or None)

    def rope(self, count: int, q: TensorSpec, k: TensorSpec | None, tokens: int) -> None:
        if self.model.rope:
            table = self.tensor(tokens, q.shape[-1] // 2, dtype="float32")
            self.add("rope", count, q=q, k=k, cos=table, sin=table, style=self.model.rope)

    def attention(self, count: int, tokens: int, seen: int, heads: int, kv_heads: int, dim: int, *,
                  value_dim: int = 0, causal: bool = False, window: int = 0,
                  mask: TensorSpec | None = None) -> None:
        """Add attention: rope leaves q and k contiguous, a projection leaves them transposed."""
        m, rotated = self.model, bool(self.model.rope)
        cached = self.decoding
        if window and seen > window and cached:
            seen, window = window, 0           # the cache holds only the window
        self.add("attention", count, query=self.heads(heads, tokens, dim, not rotated),
                 key=self.heads(kv_heads, seen, dim, not rotated and not cached),
                 value=self.heads(kv_heads, seen, value_dim or dim, not cached), attn_mask=mask,
                 is_causal=(causal and tokens > 1) or None, scale=m.scale, softcap=m.softcap
                 or None, window_left=window - 1 if window and window < seen else None)

    def mlp(self, count: int, width: int, ffn: int, tokens: int = 0,
            bias: bool | None = None) -> None:
        activation, bias = self.model.activation, self.model.bias if bias is None else bias
        inner_rows = 2 * ffn if activation in ("swiglu", "geglu", "geglu_tanh", "reglu") else ffn
        self.add("mlp", count, x=self.tensor(self.batch, tokens or self.tokens, width),
                 weight_in=self.tensor(inner_rows, width), weight_down=self.tensor(width, ffn),
                 activation=activation, bias_in=self.optional(bias, inner_rows),
                 bias_down=self.optional(bias, width))

    def feed_forward(self) -> None:
        m = self.model
        if not m.experts:
            self.mlp(m.layers, m.hidden, m.ffn)
            return
        count, k, rows = m.layers - m.dense_layers, m.experts_per_token, self.batch * self.tokens
        self.mlp(m.dense_layers, m.hidden, m.ffn)
        self.linear(count, m.hidden, m.experts, bias=False)
        logits = self.tensor(self.batch, self.tokens, m.experts)
        self.add("moe_gate", count, logits=logits, top_k=k, **m.routing)
        # where the ids are too many to describe
        by: dict[str, Any] = {"logits": logits, "top_k": k}
        if rows * k <= MAX_VALUES:
            # evenly spread
            chosen = [(t * k + slot) % m.experts for t in range(rows) for slot in range(k)]
            by = {"topk_ids": self.integers(chosen, self.batch, self.tokens, k),
                  "topk_weights": self.tensor(self.batch, self.tokens, k, dtype="float32")}
        self.add("moe", count, x=self.tensor(self.batch, self.tokens, m.hidden),
                 w_gate_up=self.tensor(m.experts, 2 * m.expert_ffn, m.hidden),
                 w_down=self.tensor(m.experts, m.hidden, m.expert_ffn), **by)
        if m.shared_experts:
            self.mlp(count, m.hidden, m.shared_experts * m.expert_ffn)

    def embedding(self) -> None:
        m = self.model
        ids = TensorSpec((self.batch, self.tokens), "int64", below=m.vocab)
        self.add("embedding", 1, ids=ids, weight=self.tensor(m.vocab, m.hidden),
                 scale=float(m.hidden) ** 0.5 if m.norm_offset else None)

    def token(self) -> None:
        """Add the calls from the last hidden state to the next token."""
        m = self.model
        self.linear(1, m.hidden, m.vocab, tokens=1, bias=False)
        self.add("sample", 1, logits=self.tensor(self.batch, m.vocab, dtype="float32"),
                 temperature=0.7, top_k=50,
                 top_p=0.9, seed=1)


def _decoder(s: _Step) -> tuple[Call, ...]:
    m = s.model
    s.embedding()
    s.norms()
    if m.kv_rank:
        _latent_attention(s)
    else:
        q, k = (s.heads(n, s.tokens, m.head_dim, True) for n in (m.heads, m.kv_heads))
        s.linear(m.layers, m.hidden, (m.heads + 2 * m.kv_heads) * m.head_dim)
        s.head_norm(m.layers, m.heads, s.tokens)
        s.head_norm(m.layers, m.kv_heads, s.tokens)
        s.rope(m.layers, q, k, s.tokens)
        windowed = m.layers - m.full_layers if m.window else 0
        for count, window in ((windowed, m.window), (m.layers - windowed, 0)):
            s.attention(count, s.tokens, s.seen, m.heads, m.kv_heads, m.head_dim, causal=True,
                        window=window)
        s.linear(m.layers, m.heads * m.head_dim, m.hidden)
    s.feed_forward()
    s.token()
    return tuple(s.calls)


def _latent_attention(s: _Step) -> None:
    """Prefill rebuilds keys and values from the latent; decoding attends to it, in pages."""
    m, plain = s.model, s.model.head_dim - s.model.rope_dim
    if m.q_rank:
        s.linear(m.layers, m.hidden, m.q_rank)
        s.norm(m.layers, m.q_rank)
    s.linear(m.layers, m.q_rank or m.hidden, m.heads * m.head_dim)
    s.linear(m.layers, m.hidden, m.kv_rank + m.rope_dim)
    s.norm(m.layers, m.kv_rank)
    s.rope(m.layers, s.heads(m.heads, s.tokens, m.rope_dim, True),
           s.heads(1, s.tokens, m.rope_dim, False), s.tokens)
    if not s.decoding:
        s.linear(m.layers, m.kv_rank, m.heads * (plain + m.value_dim))
        s.attention(m.layers, s.tokens, s.seen, m.heads, m.heads, m.head_dim, value_dim=m.value_dim,
                    causal=True)
    else:
        pages = -(-s.seen // PAGE)
        table = s.integers(list(range(s.batch * pages)), s.batch, pages, dtype="int32")
        s.add("mla_paged_attention", m.layers, q_nope=s.tensor(s.batch, m.heads, m.kv_rank),
              q_pe=s.tensor(s.batch, m.heads, m.rope_dim),
              ckv_cache=s.tensor(s.batch * pages, PAGE, m.kv_rank),
              kpe_cache=s.tensor(s.batch * pages, PAGE, m.rope_dim), block_table=table,
              context_lens=s.integers([s.seen] * s.batch, s.batch, dtype="int32"), is_causal=True,
              scale=m.head_dim ** -0.5, max_seqlen_q=1)
    s.linear(m.layers, m.heads * m.value_dim, m.hidden)


def _encoder(s: _Step) -> tuple[Call, ...]:
    m = s.model
    if not m.tokens:
        s.embedding()
    s.norm(m.norms * m.layers + 1, m.hidden)
    s.linear(m.layers, m.hidden, 3 * m.heads * m.head_dim)
    s.attention(m.layers, s.tokens, s.seen, m.heads, m.kv_heads, m.head_dim)
    s.linear(m.layers, m.heads * m.head_dim, m.hidden)
    s.mlp(m.layers, m.hidden, m.ffn)
    s.linear(1, m.hidden, m.vocab if m.tokens else m.hidden, tokens=1)
    return tuple(s.calls)


def _encoder_decoder(s: _Step) -> tuple[Call, ...]:
    """The prompt goes through the encoder; decoding attends to itself and to the prompt."""
    m = s.model
    bias = s.tensor(1, m.heads, s.tokens, s.seen)
    s.embedding()
    s.norm((3 if s.decoding else 2) * m.layers + 1, m.hidden)
    s.linear(m.layers, m.hidden, 3 * m.heads * m.head_dim)
    s.attention(m.layers, s.tokens, s.seen, m.heads, m.kv_heads, m.head_dim, mask=bias)
    # and two for cross attention
    s.linear((3 if s.decoding else 1) * m.layers, m.heads * m.head_dim, m.hidden)
    if s.decoding:
        s.attention(m.layers, s.tokens, s.prompt, m.heads, m.kv_heads, m.head_dim)
        s.token()
    s.mlp(m.layers, m.hidden, m.ffn)
    return tuple(s.calls)


def _unet(s: _Step) -> tuple[Call, ...]:
    m = s.model
    for level in m.levels:
        c, n, heads, count = level.channels, level.tokens, level.heads, level.blocks
        side = max(int(n ** 0.5), 1)
        s.add("group_norm", level.inputs, x=s.tensor(s.batch, c, side, n // side),
              groups=_groups(c), weight=s.tensor(c), bias=s.tensor(c), eps=1e-6)
        s.add("layer_norm", 3 * count, x=s.tensor(s.batch, n, c), weight=s.tensor(c),
              bias=s.tensor(c), eps=1e-5)
        s.linear(4 * count, c, c, tokens=n)
        s.linear(2 * count, c, c, tokens=n, bias=True)
        s.linear(2 * count, m.text_width, c, tokens=m.text_tokens)
        s.attention(count, n, n, heads, heads, c // heads)
        s.attention(count, n, m.text_tokens, heads, heads, c // heads)
        s.mlp(count, c, 4 * c, tokens=n, bias=True)
    return tuple(s.calls)


def _groups(channels: int) -> int:
    return next(n for n in (32, 16, 8, 4, 2, 1) if channels % n == 0)


def _dit(s: _Step) -> tuple[Call, ...]:
    """Image and text have own weights and attend to each other; then shared layers, if any."""
    m, width = s.model, s.model.heads * s.model.head_dim
    both = s.tokens + m.text_tokens
    for tokens in filter(None, (s.tokens, m.text_tokens)):
        s.norm(2 * m.layers, m.hidden, tokens)
        s.linear(m.layers, m.hidden, 3 * width, tokens)
        s.head_norm(2 * m.layers, m.heads, tokens)
        s.linear(m.layers, width, m.hidden, tokens)
        s.mlp(m.layers, m.hidden, m.ffn, tokens)
        s.linear(m.layers, m.hidden, 6 * m.hidden, 1)          # modulation
    if m.single_layers:
        s.norm(m.single_layers, m.hidden, both)
        s.linear(m.single_layers, m.hidden, 3 * width + m.ffn, both)
        s.head_norm(2 * m.single_layers, m.heads, both)
        s.linear(m.single_layers, width + m.ffn, m.hidden, both)
        s.linear(m.single_layers, m.hidden, 3 * m.hidden, 1)
    rotated = s.heads(m.heads, both, m.head_dim, True)
    s.rope(m.layers + m.single_layers, rotated, rotated, both)
    s.attention(m.layers + m.single_layers, both, both, m.heads, m.kv_heads, m.head_dim)
    return tuple(s.calls)


_BUILDERS = {"decoder": _decoder, "encoder": _encoder, "encoder-decoder": _encoder_decoder,
             "unet": _unet, "dit": _dit}
