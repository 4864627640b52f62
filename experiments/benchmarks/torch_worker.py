"""transformers + torch, to be compared with. Runs in an environment of its own, which has no JAX: `torch_side.py` starts it.

Reads one JSON object a line, {"do": ..., arguments}, and answers each by one line: the result, or {"error": ...}.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from typing import Any

import numpy as np
import torch
import transformers


class Worker:
    """One model, with an optimizer after `train`."""

    def __init__(self) -> None:
        self.model = self.optimizer = self.tokens = None
        self.clip = 0.0

    def versions(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}

    def load(self, path: str, attention: str, experts: str, threads: int) -> dict[str, Any]:
        """The model in float32 with these implementations of attention (eager, sdpa) and of experts (eager, grouped_mm)."""
        torch.set_num_threads(threads)
        self.model = self.optimizer = None
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
        self.model.set_experts_implementation(experts)
        return {"parameters": sum(p.numel() for p in self.model.parameters())}

    def train(
        self, tokens: str, learning_rate: float, b1: float, b2: float, eps: float, weight_decay: float, clip: float,
    ) -> dict[str, Any]:
        """Makes ready for `step`: AdamW in torch's fused form, and the tokens [B, T] of a .npy file."""
        self.model.train()
        self.tokens, self.clip = torch.from_numpy(np.load(tokens).astype(np.int64)), clip
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(b1, b2), eps=eps, weight_decay=weight_decay, fused=True)
        return {}

    def step(self, steps: int) -> dict[str, Any]:
        """Wall and processor seconds of every step, and its loss."""
        wall, cpu, losses = [], [], []
        for _ in range(steps):
            started, started_cpu = time.perf_counter(), time.process_time()
            loss = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - started_cpu)
            losses.append(loss.item())
        return {"seconds": wall, "cpu_seconds": cpu, "losses": losses,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def prefill(self, tokens: str, length: int) -> dict[str, Any]:
        """Wall seconds of one forward pass over the first `length` tokens of a .npy file [1, T], with the last token's logits."""
        self.model.eval()
        row = torch.from_numpy(np.load(tokens)[:, :length].astype(np.int64))
        with torch.inference_mode():
            started = time.perf_counter()
            self.model(input_ids=row, use_cache=False, logits_to_keep=1)
            return {"seconds": time.perf_counter() - started}


def main() -> None:
    # Libraries print to standard output; the answers have it to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
