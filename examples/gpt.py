"""A GPT of 11 million weights learns Python, byte by byte: bits per byte and perplexity on text that it has not seen.

python examples/gpt.py [FILES ...]              without files: the source of Python's standard library; --small for a CPU
torchrun --nproc-per-node 2 examples/gpt.py     the same fingerprint, as with samestep train examples/gpt.py --devices 4
It shows scores and labels at every position (the default loss), a metric, warm-up and cosine, and 16 bits inside a model.
"""

import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import samestep as ss


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.2))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.token, self.place = nn.Embedding(257, width), nn.Embedding(context, width)  # 256: a file begins
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.scores = nn.Linear(width, 257, bias=False)

    def forward(self, x):  # (B, L) -> (B, L, 257)
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            return self.scores(self.blocks(self.token(x) + self.place.weight)).float()


if __name__ == "__main__":
    small, names = "--small" in sys.argv, [Path(name) for name in sys.argv[1:] if name != "--small"]
    files = names or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: 5 if small else None]
    context, epochs, rate, shape = (32, 2, 1e-2, (1, 64, 2)) if small else (256, 5, 1e-3, (6, 384, 6))
    text = np.array([token for file in files for token in (256, *file.read_bytes())])
    x, y = (text[i:][: (len(text) - 1) // context * context].reshape(-1, context) for i in (0, 1))  # y: the next ones
    k = len(x) * 9 // 10
    torch.manual_seed(0)
    run = ss.Trainer(
        epochs, 64, optimizer=ss.adamw(weight_decay=0.1), gradient_clip_val=1.0,
        schedule=ss.cosine(rate, epochs * -(-k // 64) - 20, end=1e-4).warmup(20),
        metrics={"bits": lambda s, y: (F.cross_entropy(s.flatten(0, 1), y.flatten(), reduction="sum") / np.log(2), y.numel())},
    ).fit(GPT(*shape, context), ss.Data((x[:k], y[:k]), (x[k:], y[k:])))  # fmt: skip
    if run.rank == 0:
        loss, bits = run.history[-1]["test_loss"], run.history[-1]["test_bits"]
        print(f"{bits:.3f} bits per byte, perplexity {np.exp(loss):.3f}, fingerprint {run.fingerprint}")
