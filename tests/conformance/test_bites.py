"""Deliberately broken twins of the step. The suite must reject every one of them, or it shows nothing."""

import functools

import pytest

import samestep as ss
from conformance import suite
from samestep.errors import ReplicasDiffer
from samestep.processes import exchange as exchanging
from samestep.schedules.rates import Rates
from samestep.shards import cut_pass
from samestep.training import fit as fitting
from samestep.training import replicas as grouping
from samestep.training import step as stepping

Replica = suite.zoo.Replica


def rejected(model, monkeypatch, breakage):
    """The suite passes as things are, and fails with the breakage in place."""
    # Without the run's own checks, which would notice some of this before the suite does.
    runs = functools.partial(suite.fit, model, rehearse=False, check_every=None)
    suite.check(runs, (2,))
    breakage(monkeypatch)
    with pytest.raises((AssertionError, ReplicasDiffer)):  # the fit itself may be the first to notice
        suite.check(runs, (2, 3))


class DeviceOrder:
    """Adds a device's shards one after the other, as they lie, instead of along the tree."""

    def __init__(self, n, add):
        self.held, self.add_up = {}, add

    def add(self, span, value):
        self.held[span] = value

    @property
    def parts(self):
        if not self.held:
            return {}
        spans = sorted(self.held)
        return {(spans[0][0], spans[-1][1]): functools.reduce(self.add_up, [self.held[span] for span in spans])}

    def total(self):
        return next(iter(self.parts.values()))


def sum_in_device_order(monkeypatch):
    def exchange(backend, parts, n, devices, size):
        return [sum(vector for held in parts for vector in held.values()) for _ in devices]

    monkeypatch.setattr(stepping, "Fold", DeviceOrder)
    monkeypatch.setattr(stepping, "exchange", exchange)
    if suite.BACKEND == "torch":  # which adds neighbours by itself
        monkeypatch.setattr("samestep.backends.torch.traced.Fold", DeviceOrder)


def watched_groups(monkeypatch, touch=lambda group: None):
    """How many devices the current run has, for twins that need to know; `touch` is called with each new group."""
    make, seen = grouping.Replicas.__init__, {}

    def init(self, settings, backend, model, measure, devices, world):
        seen["devices"] = len(devices)
        make(self, settings, backend, model, measure, devices, world)
        touch(self)

    monkeypatch.setattr(grouping.Replicas, "__init__", init)
    return seen


def dropped_shard(monkeypatch):
    """Cuts shards over devices evenly and forgets the remainder, as the chapters' Paddle code does with examples."""
    gradient, run = Replica.gradient, watched_groups(monkeypatch)

    def forgetful(self, x, y, key, shard):
        kept = self.shards // run["devices"] * run["devices"]
        return gradient(self, x, y, key, shard) * (shard < kept)

    monkeypatch.setattr(Replica, "gradient", forgetful)


def shared_storage(monkeypatch):
    """Replicas on one device alias one vector, as the chapters' get_params does in PyTorch: k updates instead of one."""

    def alias(group):
        for replica in group.replicas[1:]:
            for name in ("weights", "_vectors", "_fingerprint"):  # where frameworks keep them, and what looks at them
                if name in vars(replica):
                    setattr(replica, name, getattr(group.replicas[0], name))

    watched_groups(monkeypatch, alias)


def dropout_keyed_by_device(monkeypatch):
    def number(group):
        for rank, replica in enumerate(group.replicas):
            replica.rank = rank

    gradient = Replica.gradient
    watched_groups(monkeypatch, number)
    monkeypatch.setattr(Replica, "gradient", lambda self, x, y, key, shard: gradient(self, x, y, self.rank, shard))


def one_shard_per_device(monkeypatch):
    """Computes all examples of a device at once, so that batch norm sees them together."""
    run = watched_groups(monkeypatch)
    monkeypatch.setattr(fitting, "cut_pass", lambda n, batch, shards: cut_pass(n, batch, run.get("devices", shards)))


def schedule_advanced_per_device(monkeypatch):
    """As Accelerate does (#1382): k processes, k steps of the schedule for one update."""
    start, run = Rates.__init__, watched_groups(monkeypatch)

    def advanced(self, schedule, *rest):
        start(self, lambda t: schedule(t * run["devices"]), *rest)

    monkeypatch.setattr(Rates, "__init__", advanced)


@pytest.mark.parametrize(
    ("breakage", "model"),
    [
        (sum_in_device_order, "lenet_modern"),
        (sum_in_device_order, "embedding"),
        (dropped_shard, "lenet_modern"),
        (shared_storage, "lenet_modern"),
        (dropout_keyed_by_device, "mlp_with_dropout"),
        (one_shard_per_device, suite.NORMED),
        (schedule_advanced_per_device, "embedding"),
    ],
)
def test_the_suite_rejects(breakage, model, monkeypatch):
    if breakage is shared_storage and suite.BACKEND == "jax":
        pytest.skip("JAX's arrays cannot be written to: sharing one does no harm")
    rejected(model, monkeypatch, breakage)


def test_a_part_that_never_arrives_is_an_error(monkeypatch):
    """The sum itself refuses to be incomplete."""
    exchange = exchanging.exchange
    monkeypatch.setattr(stepping, "exchange", lambda b, parts, *rest: exchange(b, parts[:-1] + [{}], *rest))
    with pytest.raises(ss.SamestepError, match="the sum over 8 shards is not complete"):
        suite.fit("embedding", 3)


def test_a_replica_that_drifts_is_an_error(monkeypatch):
    """A fit compares its replicas after every epoch, whatever made them differ."""
    assign, seen = Replica.assign, []

    def drifting(self, parameters):
        assign(self, parameters)
        seen.append(self)
        assign(self, self.parameters + 1e-3 * seen.index(self))

    monkeypatch.setattr(Replica, "assign", drifting)
    with pytest.raises(ss.SamestepError, match="after step 2 the replicas on .*, .* are no longer equal"):
        suite.fit("embedding", 2, check_every=None)
