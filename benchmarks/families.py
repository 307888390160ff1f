"""Which language models of the installed transformers get a decode step: a tiny one of every family
is accelerated, and its tokens are compared with those it gave before.

    python benchmarks/families.py                      # all, as a table
    python benchmarks/families.py glm4_moe deepseek_v3
    python benchmarks/families.py --markdown docs/families.md

Causal language models and encoder-decoders, as transformers lists them for its AutoModel classes.
The weights are random. A family whose tiny model cannot be built is listed with the error.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import layerzero as lz

LISTS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
MAX_WEIGHTS = 3e7                              # weights: what is larger has a part that stays large
NEW = 8
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "head_dim": 16, "sliding_window": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # of older ones
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "d_model": 64, "n_heads": 4,
    "n_layers": 2, "ffn_dim": 96, "num_layers": 2, "num_heads": 4, "max_seq_len": 128,
    "word_embed_proj_dim": 64, "query_pre_attn_scalar": 16, "d_kv": 16, "d_ff": 96,
    "decoder_start_token_id": 1, **{
        f"{side}_{what}": n for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))},
    # of experts and latent attention
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 48, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 1}
EXTRA: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1}, "reformer": {"is_decoder": True}, "mpt": {"use_cache": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "deepseek_v2": {"topk_method": "group_limited_greedy"}}
EXTRA |= {kind: {"decoder_start_token_id": 0} for kind in ("t5", "mt5", "umt5", "longt5")}
# heads of latent attention have keys each
EXTRA |= {kind: {**EXTRA.get(kind, {}), "num_key_value_heads": 4} for kind in (
    "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1", "longcat_flash")}


def tiny(kind: str, name: str) -> Any:
    """A model of this kind, all of whose sizes that are known are small."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class().to_dict()
    renamed = getattr(config_class, "attribute_map", {})
    small = {n: v for n, v in SMALL.items()
             if (n in default or n in renamed) and renamed.get(n) not in SMALL}
    types = list(dict.fromkeys(default.get("layer_types") or ()))
    if "qk_rope_head_dim" in small and "head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]          # of the part that is turned
    if types:
        small["layer_types"] = (types * 2)[:2]
    config = config_class(**{**small, **EXTRA.get(kind, {})})
    with torch.device("meta"):
        size = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
    if size > MAX_WEIGHTS:
        raise ValueError(f"{size / 1e6:.0f} million weights: a part of it has sizes of its own")
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=gen) * 1.2
                                / parameter.shape[-1] ** 0.5)
    if model.can_generate():
        model.generation_config.eos_token_id = None
    return model


def generated(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
                          do_sample=False)  # type: ignore[no-any-return]


def verdict(kind: str, name: str) -> tuple[str, str]:
    """"yes", "no" or "not tried", and why."""
    try:
        model = tiny(kind, name)
    except Exception as error:  # whatever a configuration says to sizes that it does not expect
        return "not tried", _first_line(f"{type(error).__name__}: {error}")
    report = lz.accelerate(model, measure=False, patch=False)
    if not report.served and report._step is None:
        return "no", _first_line(next((text for text in report.left), ""))
    report.undo()
    try:
        before = generated(model)
    except Exception as error:  # as above
        return "not tried", _first_line(f"generate() says {type(error).__name__}: {error}")
    report = lz.accelerate(model, measure=False, patch=False)
    same = torch.equal(generated(model), before)
    own = sorted({text for text in report.kernels.values() if text.startswith("the model's own")})
    declined = "; ".join(report.declined)
    if not same:
        return "no", "OTHER TOKENS"
    if not report.served and not declined:
        declined = "generate() gives it whole sequences, no token after a cache"
    return ("yes" if report.served else "no"), declined or "; ".join(own)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.replace("|", "/").splitlines() if line.strip()]
    return " ".join(lines)[:160].removeprefix("no decode step: ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = {kind: name if isinstance(name, str) else name[0] for at in reversed(LISTS)
             for kind, name in getattr(modeling_auto, at).items()}
    rows = []
    for kind in sorted(args.families or names):
        step, why = verdict(kind, names[kind])
        rows.append((kind, names[kind], step, why))
        print(f"{kind:28} {step:10} {why}", flush=True)
    yes = sum(step == "yes" for _, _, step, _ in rows)
    untried = sum(step == "not tried" for _, _, step, _ in rows)
    summary = (f"transformers {transformers.__version__}: {yes} of {len(rows)} families get a "
               f"decode step, {untried} could not be tried at this size.")
    print(summary)
    if args.markdown:
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        args.markdown.write_text(
            "# Families with a decode step\n\nWritten by `python benchmarks/families.py "
            f"--markdown`; tiny models with random weights, same tokens as stock where it says "
            f"yes.\n\n{summary}\n\n| family | class | decode step | why not, or what stays the "
            f"model's own |\n|---|---|---|---|\n{table}\n")


if __name__ == "__main__":
    main()
