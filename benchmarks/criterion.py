"""Is an accelerated model as right as transformers is in the same precision? By the criterion of
the public comparison of decode megakernels and CUDA graphs (msaroufim/megakernels-vs-cuda-graphs).

The model in float32 (TF32 off) writes a text after each prompt. Teacher-forced on that text, from
the same keys and values of the prompt, each arm gives the logits of every further token in its own
decode steps, one at a time. Two errors of each: KL(float32 || arm), and the difference of the
negative log-likelihood of the float32 model's token, absolute. Both are averaged for each prompt;
an arm passes where the upper end of the 95 % interval of the mean difference to transformers' own,
by a bootstrap over prompts (paired: the same prompts for both), is not above 0.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

RESAMPLES, SEED = 10_000, 20310914
METRICS = ("kl", "nll")


@dataclass
class Arm:
    """Mean errors of one way to decode, a number for each prompt."""

    kl: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)            # top-1 agreement with float32
    finite: bool = True


@dataclass(frozen=True)
class Verdict:
    """The difference to transformers: its mean, and the 95 % interval."""

    difference: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        return self.high <= 0

    def __str__(self) -> str:
        return (f"{self.difference:+.2e} [{self.low:+.2e}, {self.high:+.2e}] "
                f"{'passed' if self.passed else 'NOT passed'}")


def bootstrap(ours: Sequence[float], native: Sequence[float]) -> Verdict:
    """The mean of the differences, and its interval over prompts that are drawn again."""
    apart, chance = [a - b for a, b in zip(ours, native)], random.Random(SEED)
    means = sorted(statistics.fmean(chance.choices(apart, k=len(apart))) for _ in range(RESAMPLES))
    return Verdict(statistics.fmean(apart), means[int(0.025 * RESAMPLES)],
                   means[int(0.975 * RESAMPLES)])


@torch.no_grad()
def criterion(model: Any, native: Any, prompts: Tensor, steps: int = 127) -> dict[str, Any]:
    """`model` is accelerated, `native` the same in transformers; prompts are (prompts, tokens).

    Both have the same weights, which are promoted to float32 for the reference. Logits are those
    that generate() chooses by: of a captured step as precise as it has them.
    """
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = copy.deepcopy(native).float()
    try:
        text, wanted = _write(reference, prompts, steps)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    del reference
    ours, stock = Arm(), Arm()
    for i, prompt in enumerate(prompts):
        cache = native(prompt[None], use_cache=True).past_key_values
        for arm, way in ((stock, native), (ours, model)):
            mine = copy.deepcopy(cache)
            out = [_logits(way, token.view(1, 1), mine) for token in text[i, :-1]]
            _judge(arm, wanted[i], torch.stack(out), text[i, 1:])
    verdicts = {name: bootstrap(getattr(ours, name), getattr(stock, name)) for name in METRICS}
    return {"prompts": len(prompts), "steps": steps, "ours": asdict(ours), "native": asdict(stock),
            "verdicts": {n: {**asdict(v), "passed": v.passed} for n, v in verdicts.items()},
            "passed": ours.finite and all(v.passed for v in verdicts.values()),
            "text": {n: str(v) for n, v in verdicts.items()}}


def _logits(model: Any, token: Tensor, cache: Any) -> Tensor:
    report = vars(model).get("_layerzero_acceleration")
    step = None if report is None else report._step
    if step is None or step._captured is None or step.grow(cache):
        logits: Tensor = model(token, past_key_values=cache, use_cache=True).logits
        return logits[0, -1].float()
    length = cache.get_seq_length()
    fixed = step._captured.hold(step.step(1), cache, length)
    step.served["captured"] += 1
    return fixed.logits(token, cache, length)[0, -1].float()  # type: ignore[no-any-return]


def _write(reference: Any, prompts: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The float32 model's own continuation, (prompts, steps + 1), and its logits for each token of
    it but the first, (prompts, steps, vocab)."""
    out = reference(prompts, use_cache=True, logits_to_keep=1)
    tokens, logits, cache = [out.logits[:, -1].argmax(-1)], [], out.past_key_values
    for _ in range(steps):
        out = reference(tokens[-1][:, None], past_key_values=cache, use_cache=True)
        logits.append(out.logits[:, -1])
        tokens.append(logits[-1].argmax(-1))
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def _judge(arm: Arm, wanted: Tensor, found: Tensor, target: Tensor) -> None:
    """Add the errors of one prompt, computed in float64."""
    p, q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    apart = (p - q).gather(1, target[:, None])
    arm.kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
    arm.nll.append(float(apart.abs().mean()))
    arm.same.append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    arm.finite = arm.finite and bool(found.isfinite().all())
