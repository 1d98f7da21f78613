"""k replicas on one device hold one copy of the examples, not k."""

import numpy as np

import samestep as ss
from conformance import suite
from samestep.backends import find
from samestep.data.feed import Pass

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.random((32, 1, 28, 28), dtype=np.float32), RANDOM.integers(0, 10, 32)


def put_and_gathered(devices, monkeypatch):
    """How often a fit on so many devices put the examples on one, and from how many arrays it gathered shards."""
    backend = find.load(suite.BACKEND)
    original_put, original_take = backend.put, backend.take
    puts, sources = [], []

    def put(array, device):
        puts.append(array is X)
        return original_put(array, device)

    def take(array, index):
        if len(array.shape) == 4:
            sources.append(array)  # held, or the next one could be given its address
        return original_take(array, index)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "put", put)
        patch.setattr(backend, "take", take)
        ss.Trainer(max_epochs=2, batch_size=16, devices=devices, progress=False).fit(suite.zoo.lenet(), (X, Y))
    assert sources
    return sum(puts), len({id(array) for array in sources})


def test_replicas_on_one_device_share_the_examples(monkeypatch):
    assert put_and_gathered(1, monkeypatch) == put_and_gathered(5, monkeypatch) == (1, 1)


def test_a_copy_for_every_shard_is_seen(monkeypatch):
    shard = Pass.shard

    def copies(self, span, device):
        x, y = self.feed.resident[device]
        self.feed.resident[device] = self.feed.backend.copy(x, device), y
        return shard(self, span, device)

    monkeypatch.setattr(Pass, "shard", copies)
    assert put_and_gathered(5, monkeypatch)[1] > 5
