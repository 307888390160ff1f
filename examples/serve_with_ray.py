"""An accelerated model behind Ray Serve: batched answers, streamed answers, and /metrics.

A small Llama with random weights is a deployment of Ray Serve. POST /generate answers whole;
requests that come at once are one batch. POST /stream sends each token as it is made. GET /metrics
says, for Prometheus, which kernels served. You will see eight requests at once served in batches,
with the answers each would get alone; a streamed answer; and the counters.

    pip install 'layerzero[ray,transformers,telemetry]'
    python examples/serve_with_ray.py
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request as Post
from urllib.request import urlopen

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray import init, serve, shutdown
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

PORT = int(os.environ.get("PORT", "0")) or 8123
TOKENS = 6


@serve.deployment(ray_actor_options={"num_cpus": 1})
class Generator:
    def __init__(self) -> None:
        import prometheus_client
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        import layerzero as lz
        from layerzero.integrations import prometheus

        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=256)).eval()
        self.report = lz.accelerate(self.model, measure=False)
        self.registry = prometheus_client.CollectorRegistry()
        prometheus.install(self.registry)
        self.one_at_a_time = threading.Lock()          # a decode step has one KV cache

    async def __call__(self, request: Request) -> Response | dict[str, Any]:
        if request.url.path == "/metrics":
            from prometheus_client import generate_latest
            return PlainTextResponse(generate_latest(self.registry))
        prompt = (await request.json())["prompt"]
        if request.url.path == "/stream":
            return StreamingResponse(self.stream(prompt), media_type="application/jsonl")
        tokens, batch = await self.generate(prompt)
        return {"tokens": tokens, "batch": batch}

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.2)
    async def generate(self, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
        """Answer several prompts by one call; shorter ones are padded on the left."""
        import torch
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with self.one_at_a_time, torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS,
                                      do_sample=False, pad_token_id=0, eos_token_id=None)
        return [(row[width:].tolist(), len(prompts)) for row in out]

    def stream(self, prompt: list[int]) -> Iterator[str]:
        """Yield each token as soon as it is known; Starlette runs this in a thread."""
        import torch
        ids, past = torch.tensor([prompt]), None
        with self.one_at_a_time, torch.inference_mode():
            for _ in range(TOKENS):
                out = self.model(ids, past_key_values=past, use_cache=True)
                ids, past = out.logits[:, -1:].argmax(-1), out.past_key_values
                yield json.dumps({"token": int(ids)}) + "\n"


def ask(path: str, prompt: list[int]) -> Any:
    post = Post(f"http://127.0.0.1:{PORT}/{path}", json.dumps({"prompt": prompt}).encode(),
                {"Content-Type": "application/json"})
    return urlopen(post, timeout=120)


def main() -> int:
    init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT}, logging_config={
        "log_level": "ERROR"})
    try:
        serve.run(Generator.bind())
        prompts = [list(range(5 * i + 3, 5 * i + 7 + i % 3)) for i in range(8)]
        alone = [json.load(ask("generate", p))["tokens"] for p in prompts]
        with ThreadPoolExecutor(8) as clients:
            together = list(clients.map(lambda p: json.load(ask("generate", p)), prompts))
        batches = sorted({answer["batch"] for answer in together})
        same = [answer["tokens"] for answer in together] == alone
        print(f"{len(prompts)} requests at once, in batches of up to {batches[-1]}")
        print(f"every answer as if it were alone: {same}")
        streamed = [json.loads(line)["token"] for line in ask("stream", prompts[0])]
        print(f"streamed token by token: {streamed}, as answered whole: {streamed == alone[0]}")
        with urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=60) as page:
            metrics = [line for line in page.read().decode().splitlines()
                       if line.startswith("layerzero_")]
        print(f"/metrics has {len(metrics)} lines, such as\n  {metrics[0]}")
        return 0 if same and streamed == alone[0] and batches[-1] > 1 and metrics else 1
    finally:
        serve.shutdown()
        shutdown()


if __name__ == "__main__":
    sys.exit(main())
