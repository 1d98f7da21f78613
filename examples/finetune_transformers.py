"""A model of Hugging Face's transformers learns to tell from which package of Python's standard library a line of code is.

python examples/finetune_transformers.py [MODEL]    the folder of a model to begin from; else a small BERT from nothing
torchrun --nproc-per-node 2 examples/finetune_transformers.py       the same fingerprint; --small: seconds on a CPU

It shows examples that are dictionaries, lines of unequal lengths that are filled up within their shard, and a model that
computes its own loss. A batch goes to the model by the names of its arrays, as model(**batch); its accuracy is counted.
"""

import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch
import transformers as hf

import samestep as ss

PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "unittest", "urllib")


class Lines(torch.utils.data.Dataset):
    """Lines of 20 to 100 letters, each once, as dictionaries."""

    def __init__(self, encode, most):
        library, self.encode = Path(sysconfig.get_paths()["stdlib"]), encode
        texts = ["\n".join(file.read_text("utf-8") for file in sorted((library / p).glob("*.py"))) for p in PACKAGES]
        lines = [(line, i) for i, text in enumerate(texts) for line in dict.fromkeys(map(str.strip, text.split("\n")))]
        self.lines = [line for line in lines if 20 <= len(line[0]) <= 100]
        self.lines = [self.lines[i] for i in np.random.default_rng(0).permutation(len(self.lines))[:most]]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        ids = self.encode(self.lines[i][0])
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": self.lines[i][1]}


if __name__ == "__main__":
    small, path = "--small" in sys.argv, next((name for name in sys.argv[1:] if name != "--small"), None)
    torch.manual_seed(0)
    if path:
        encode = hf.AutoTokenizer.from_pretrained(path).encode
        model = hf.AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(PACKAGES))
    else:
        encode = lambda line: [1 + byte for byte in line.encode()]  # noqa: E731
        size = {"hidden_size": 32, "num_hidden_layers": 1} if small else {"hidden_size": 256, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "intermediate_size": 4 * size["hidden_size"], "num_labels": len(PACKAGES)}
        model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=257, **size, **heads))
    lines = Lines(encode, 400 if small else None)
    k, epochs = len(lines) * 9 // 10, 3 if small else 10
    train, test = torch.utils.data.Subset(lines, range(k)), torch.utils.data.Subset(lines, range(k, len(lines)))
    data = ss.Data(train, test, pad={"input_ids": 0, "attention_mask": 0}, pad_to=32)
    schedule = ss.cosine(2e-3 if small else 3e-4, epochs - 1).warmup(1).in_epochs(smooth=True)
    run = ss.Trainer(epochs, 64, optimizer=ss.adamw(), schedule=schedule, gradient_clip_val=1.0).fit(model, data)
    if run.rank == 0:
        loss, accuracy = run.history[-1]["train_loss"], run.history[-1]["test_accuracy"]
        print(f"loss {loss:.4f}, test accuracy {accuracy:.4f}, fingerprint {run.fingerprint}")
