"""The parts of the PyTorch backend, one by one and without a fit: a session, a probe, replicas, lanes, bands, vectors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from samestep.backends import layout as layouts
from samestep.backends import workers
from samestep.backends.losses import Measure
from samestep.backends.making import Making
from samestep.backends.torch import kernels, noise
from samestep.backends.torch.backend import TorchBackend
from samestep.backends.torch.bands import Bands, watched
from samestep.backends.torch.flat import Flat, TorchLayout, from_host, on_host
from samestep.backends.torch.lane import OPTIMIZER, Lane
from samestep.backends.torch.replica import TorchReplica
from samestep.devices import cpu, gpu, host_memory
from samestep.errors import Invalid, NotDeterministic, Written, WrongType


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> TorchBackend:
    """A backend of its own, on a machine with one core."""
    monkeypatch.setattr(workers, "cores", lambda: 1)
    return TorchBackend()


def replica(model: nn.Module, shards: int = 4, loss: Any = None, state: Any = (), **settings: Any) -> TorchReplica:
    backend = TorchBackend()
    backend.state = state
    return backend.replica(model, loss, cpu(), shards, **settings)


# Devices and arrays


def test_gpus_are_listed_and_asked_for_their_memory(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (30 + i, 100))
    assert backend.devices() == [cpu(), gpu(0), gpu(1)]
    assert backend.memory(gpu(1)) == (100, 69)
    assert backend.memory(cpu())[0] == host_memory()[0]


def test_what_is_copied_to_a_gpu_need_not_wait(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host must: it is read at once."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, where, **how: asked.append((where, how)))
    backend.put(torch.ones(2), gpu(0))
    monkeypatch.setattr(backend, "device_of", lambda array: gpu(0))
    backend.put(torch.ones(2), cpu())
    assert asked == [("cuda:0", {"non_blocking": True}), ("cpu", {"non_blocking": False})]


def test_a_copy_has_memory_of_its_own_and_a_gradient_on_request(backend: TorchBackend) -> None:
    x = torch.ones(2, requires_grad=True)
    plain, leaf = backend.copy(x, cpu()), backend.copy(x, cpu(), gradient=True)
    assert len({t.data_ptr() for t in (x, plain, leaf)}) == 3
    assert (plain.requires_grad, plain.grad) == (False, None)
    assert (leaf.requires_grad, leaf.grad.tolist()) == (True, [0.0, 0.0])


def test_a_vector_is_clipped_to_a_norm(backend: TorchBackend) -> None:
    assert backend.clip(torch.tensor([3.0, 4.0]), 2.5).tolist() == [1.5, 2.0]
    assert backend.clip(torch.tensor([3.0, -4.0]), 5.0).tolist() == [3.0, -4.0]


def test_a_hit_is_the_class_with_the_highest_score(backend: TorchBackend) -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0], [0.0, 2.0, 1.0], [5.0, 2.0, 1.0], [0.0, 0.0, 1.0]])
    assert backend.count_hits(scores, torch.tensor([0, 1, 2, 0, 1])).item() == 2


# A session


def test_a_session_has_settings_of_its_own_and_puts_back_what_was(backend: TorchBackend) -> None:
    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic

    def found() -> list[Any]:
        return [cudnn.benchmark, cudnn.deterministic, fill.fill_uninitialized_memory,
                torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.get_num_threads(), torch._C._get_mkldnn_enabled(), len(warnings.filters)]  # fmt: skip

    usual = found()
    try:
        for deterministic, warn_only in ((True, True), (False, False)):
            cudnn.benchmark, cudnn.deterministic, fill.fill_uninitialized_memory = True, not deterministic, True
            torch.use_deterministic_algorithms(not deterministic, warn_only=warn_only)
            before = found()
            with backend.session([cpu()], deterministic=deterministic, threads=3):
                assert found()[:6] == [False, deterministic, False, deterministic, False, 3]
                assert _get_current_function_mode_stack() == []  # which would cost time
                assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)
                torch.rand(3)
            assert found() == before
    finally:
        cudnn.benchmark, cudnn.deterministic, fill.fill_uninitialized_memory = usual[:3]
        torch.use_deterministic_algorithms(usual[3], warn_only=usual[4])


def test_a_session_leaves_the_generator_as_it_was(backend: TorchBackend) -> None:
    before = torch.get_rng_state()
    with backend.session([cpu()], deterministic=True, threads=1):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_warning_of_rnns_about_their_memory_is_not_shown_in_a_session(backend: TorchBackend) -> None:
    with backend.session([cpu()], deterministic=True, threads=1):
        warnings.warn("RNN module weights are not part of single contiguous chunk of memory", stacklevel=1)


@pytest.mark.parametrize(
    ("cores", "threads", "own", "there"), [(1, 1, 1, False), (2, 1, 1, True), (4, 3, 3, False), (6, 3, 1, True)]
)
def test_beside_workers_the_caller_has_one_thread(
    cores: int, threads: int, own: int, there: bool, backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: cores)
    with backend.session([cpu()], deterministic=True, threads=threads):
        assert (torch.get_num_threads(), backend.workers.there) == (own, there)
        assert backend.map([torch.get_num_threads]) == [threads]


def test_a_session_of_gpus_keeps_their_generators_and_the_callers_device_and_threads(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: kept.append(devices) or nullcontext())
    threads = torch.get_num_threads()
    with torch.device("meta"), backend.session([gpu(1), gpu(0)], deterministic=True, threads=threads + 1):
        assert torch.empty(0).device.type == "meta"
        assert torch.get_num_threads() == threads
    with torch.device("meta"), backend.session([cpu(), cpu()], deterministic=True, threads=1):
        assert torch.empty(0).device.type == "cpu"
    assert kept == [[1, 0], []]


def test_only_a_portable_session_has_kernels_of_every_cpu(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    now: list[str] = []

    @contextmanager
    def ours() -> Iterator[None]:
        now.append("ours")
        yield
        now.append("usual")

    monkeypatch.setattr(kernels, "of_every_cpu", ours)
    with backend.session([cpu()], deterministic=True, threads=1):
        assert now == []
    monkeypatch.setattr(backend, "portable", True)
    with backend.session([cpu()], deterministic=True, threads=1):
        assert now == ["ours"]
    assert now == ["ours", "usual"]


def test_a_portable_lstm_is_not_onednns(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    lstm, dense, found = nn.LSTM(2, 2), nn.Linear(2, 2), []
    for portable, model in ((False, lstm), (True, dense), (True, nn.Sequential(dense, lstm))):
        monkeypatch.setattr(backend, "portable", portable)
        monkeypatch.setattr(kernels, "of_every_cpu", nullcontext)
        with backend.session([cpu()], deterministic=True, threads=1):
            backend.replica(model, None, cpu(), 2)
            found.append(torch._C._get_mkldnn_enabled())
        assert torch._C._get_mkldnn_enabled()
    assert found == [True, True, False]


# A probe


class Raises(nn.Linear):
    def __init__(self, error: Exception) -> None:
        super().__init__(2, 3, bias=False)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.uint8])
def test_examples_that_are_no_reals_are_to_be_converted_if_a_layer_wants_those(
    dtype: Any, backend: TorchBackend
) -> None:
    x, y = np.ones((1, 2), dtype), np.zeros(1, np.int64)
    with pytest.raises(WrongType) as caught:
        backend.probe(nn.Linear(2, 3), None, x, y, "images")
    assert str(caught.value) == (
        f"images is {x.dtype} and the model float32: convert one, for example with x.astype('float32')"
    )
    with pytest.raises(RuntimeError, match="^something else$"):
        backend.probe(Raises(RuntimeError("something else")), None, x, y)
    with pytest.raises(ValueError, match="^dtype$"):
        backend.probe(Raises(ValueError("dtype")), None, x, y)


def test_a_layer_that_complains_about_reals_is_let_speak(backend: TorchBackend) -> None:
    with pytest.raises(RuntimeError, match="^a dtype of its own$"):
        backend.probe(Raises(RuntimeError("a dtype of its own")), None, np.ones((1, 2), np.float32), np.zeros(1, int))


def test_a_probe_calls_the_loss_if_there_is_one(backend: TorchBackend) -> None:
    called: list[Any] = []

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        called.append((tuple(output.shape), y.tolist(), output.requires_grad))
        return output.sum(1)

    x, y = np.ones((1, 2), np.float32), np.array([2])
    assert backend.probe(nn.Linear(2, 3, bias=False), loss, x, y).dtype == "float32"
    assert called == [((1, 3), [2], False)]
    with pytest.raises(WrongType, match="of scores per class"):  # which cross-entropy would not say
        backend.probe(nn.Sequential(nn.Linear(2, 3), nn.Flatten(0)), None, x, y)


class Noisy(nn.Linear):
    """Draws, and freezes its bias, in every pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bias.requires_grad_(False)
        return super().forward(x) + torch.rand(1)


def test_a_probe_leaves_generator_and_model_as_they_were(backend: TorchBackend) -> None:
    model, before = Noisy(2, 3), torch.get_rng_state()
    backend.probe(model, None, np.ones((1, 2), np.float32), np.array([2]))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.bias.requires_grad


class Lazy(nn.Module):
    """Notes in which mode it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.modes = nn.LazyLinear(3), list[bool]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        return self.inner(x)


def test_a_probe_makes_lazy_weights_in_evaluation_from_the_callers_generator(backend: TorchBackend) -> None:
    model, before = Lazy(), torch.get_rng_state()
    backend.probe(model, None, np.ones((1, 2), np.float32), np.array([2]))
    assert (model.modes, model.training, model.inner.weight.shape) == ([False], True, (3, 2))
    assert not torch.equal(torch.get_rng_state(), before)  # as in the user's own first pass


# Errors


@pytest.mark.parametrize(
    "said",
    [
        "the operation put_ does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms'",
        "Deterministic behavior was enabled with one of these; the name of it is put_",
    ],
)  # fmt: skip
def test_an_operation_without_a_deterministic_kernel_is_named(said: str, backend: TorchBackend) -> None:
    error = backend.explain(RuntimeError(said))
    assert type(error) is NotDeterministic
    assert str(error).startswith(f"put_ has no deterministic kernel in torch {torch.__version__}: use another")
    assert backend.explain(TypeError(said)) is None


def test_batch_norm_of_one_value_is_one_line(backend: TorchBackend) -> None:
    said = "Expected more than 1 value per channel when training, got input size torch.Size([1, 8])"
    error = backend.explain(ValueError(said))
    assert type(error) is Invalid
    assert str(error) == (
        f"batch norm needs more than one value per channel in every shard: lower shards, or raise batch_size ({said})"
    )


# Vectors


def test_a_layout_keeps_the_order_of_each_memory() -> None:
    last = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    strided = torch.arange(12.0).reshape(3, 4)[:, ::2]
    tensors = [last, strided, torch.arange(6.0).reshape(2, 3).t()]
    layout = TorchLayout.of(["last", "strided", "turned"], tensors)
    assert layout.orders == ((0, 2, 3, 1), (0, 1), (1, 0))
    assert (layout.shapes, layout.dtype, layout.real, layout.unit) == (
        ((1, 2, 3, 4), (3, 2), (3, 2)),
        "float32",
        True,
        16,
    )
    assert layout.spans == [(0, 24), (32, 38), (48, 54)]
    flat = Flat.of(layout.names, tensors, torch.device("cpu"))
    assert [torch.equal(view, tensor) for view, tensor in zip(flat.views, tensors, strict=True)] == [True] * 3
    assert flat.views[0].stride() == last.stride()
    assert [layout.flatten(i, t).tolist() for i, t in enumerate(tensors)] == [
        flat.vector[lo:hi].tolist() for lo, hi in layout.spans
    ]
    on_numpy = layout.cut(flat.vector.numpy())
    assert [a.tolist() for a in on_numpy] == [t.tolist() for t in tensors]
    sparse = torch.eye(3)[:, :2].to_sparse()
    assert layout.flatten(1, sparse).tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_one_whole_number_has_a_layout_too() -> None:
    layout = TorchLayout.of(["count"], [torch.tensor(3)])
    assert (layout.real, layout.unit, layout.dtype, layout.size) == (False, 8, "int64", 8)


def test_complex_numbers_lie_as_pairs() -> None:
    flat = Flat.of(["waves"], [torch.tensor([1 + 2j, 3j])], torch.device("cpu"))
    assert flat.vector[:5].tolist() == [1.0, 2.0, 0.0, 3.0, 0.0]
    assert flat.twin().views[0].tolist() == [1 + 2j, 3j]
    twin = flat.twin()
    twin.vector += 1
    assert flat.views[0].tolist() == [1 + 2j, 3j]
    assert twin.views[0].tolist() == [2 + 3j, 1 + 4j]


def test_state_moves_by_the_mean_of_its_changes_and_whole_numbers_to_the_nearest() -> None:
    def flat(values: torch.Tensor) -> Flat:
        return Flat.of(["state"], [values], torch.device("cpu"))

    real, whole, short = (
        flat(torch.tensor([1.5, 2.0])),
        flat(torch.tensor([7, 200], dtype=torch.uint8)),
        flat(torch.ones(2).half()),
    )
    before = [one.vector.clone() for one in (real, whole, short)]
    for one, change in ((real, [0.25, -1.0]), (whole, [2.6, -3.4]), (short, [0.5, 1.0])):
        one.move(torch.cat([torch.tensor(change), torch.zeros(one.layout.size - 2)]))
    assert real.views[0].tolist() == [1.75, 1.0]
    assert whole.views[0].tolist() == [10, 197]
    assert short.views[0].tolist() == [1.5, 2.0]
    assert (whole.vector.dtype, short.vector.dtype) == (torch.uint8, torch.float16)
    changes = [one.change_from(old) for one, old in zip((real, whole, short), before, strict=True)]
    assert [change[:2].tolist() for change in changes] == [[0.25, -1.0], [3, -3], [0.5, 1.0]]


@pytest.mark.parametrize(("kind", "there"), [
    ("float16", "float16"), ("bfloat16", "float32"), ("float8_e5m2", "float32"), ("float32", "float32"), ("float64", "float64"),
    ("int16", "int16"), ("uint8", "uint8"), ("int64", "int64"), ("bool", "bool"), ("complex64", "float32"),
])  # fmt: skip
def test_every_type_goes_to_the_host_and_back(kind: str, there: str) -> None:
    values = torch.tensor([0.0, 1.0, 1.0]).to(getattr(torch, kind))
    array = on_host(values)
    assert array.dtype == there
    assert array.shape == ((3, 2) if kind == "complex64" else (3,))
    back = from_host(array, values)
    assert back.dtype == values.dtype
    assert back.tolist() == values.tolist()
    assert from_host(array, values).data_ptr() != values.data_ptr()


# Bands


def bands_of(ends: list[tuple[int, int]]) -> tuple[Bands, list[Any]]:
    """Four tensors of 3, 16, 1 and 5 numbers, each in 16 of a vector that was full of ones, and what is delivered."""
    tensors = [torch.zeros(n) for n in (3, 16, 1, 5)]
    told: list[Any] = []
    layout = TorchLayout.of(["a", "b", "c", "d"], tensors)
    return Bands(layout, ends, torch.ones(70), lambda part, band: told.append((band, part.tolist()))), told


TWOS = [2.0, 2.0, 2.0] + [0.0] * 13
FIRST, SECOND, THIRD, LAST = (0, 32), (32, 48), (48, 64), (64, 70)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 1, 0, 3]], ids=["from the first", "from the last"])
def test_a_band_is_delivered_when_all_of_it_is_there(order: list[int]) -> None:
    spans = [FIRST, SECOND, THIRD, LAST]
    bands, told = bands_of([spans[i] for i in order])
    bands.take(1, torch.full((16,), 3.0))
    assert told == []
    bands.take(3, torch.full((5,), 4.0))
    assert told == [(order.index(2), [4.0] * 5 + [0.0] * 11)]
    bands.take(0, torch.full((3,), 2.0))
    assert told[1:] == [(order.index(0), TWOS + [3.0] * 16)]
    bands.take(0, torch.full((3,), 9.0))  # again: a hook may be called twice
    assert len(told) == 2
    bands.close()
    assert told[2:] == [(order.index(1), [0.0] * 16)]
    bands.finish([torch.tensor([5.0, 6.0]), torch.zeros(4)])
    assert told[3:] == [(3, [5.0, 6.0, 0.0, 0.0, 0.0, 0.0])]


def test_what_the_backward_pass_did_not_reach_is_zero_from_the_last_band_on() -> None:
    bands, told = bands_of([THIRD, SECOND, FIRST, LAST])
    bands.close()
    assert told == [(0, [0.0] * 16), (1, [0.0] * 16), (2, [0.0] * 32)]


def test_gradients_are_watched_only_for_a_while() -> None:
    seen: list[Any] = []
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]

    def backward() -> None:
        torch.autograd.grad((weights[0] * 3).sum() + weights[1] * 5, weights)

    with watched(weights, SimpleNamespace(take=lambda i, gradient: seen.append((i, gradient.tolist())))):  # type: ignore[arg-type]
        backward()
    assert sorted(seen) == [(0, [3.0, 3.0]), (1, [5.0])]
    with watched(weights, None):
        backward()
    assert len(seen) == 2


# Lanes


class Stateful(nn.Module):
    """Replaces its buffers as `new` says: name → tensor."""

    def __init__(self, **buffers: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3, bias=False)
        self.new: dict[str, Any] = {}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent="passing" not in name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, new in self.new.items():
            setattr(self, name, new)
        return self.inner(x)


X, Y = torch.ones(2, 2), torch.tensor([0, 1])


def run(replica: TorchReplica, new: dict[str, Any]) -> nn.Module:
    lane = replica.lane(training=True)
    lane.module["model"].new = new  # type: ignore[assignment]
    lane.run(X, Y, replica.state, replica.backend)
    return lane.module["model"]


def test_buffers_that_a_pass_has_replaced_are_put_back_with_their_values() -> None:
    ours = replica(Stateful(passing=torch.zeros(3), count=torch.zeros(()), mean=torch.zeros(3), none=None))
    model = ours.lane(training=True).module["model"]
    homes = dict(model._buffers)
    run(ours, {"passing": torch.ones(5), "count": torch.zeros(()), "mean": torch.ones(3)})
    assert model.passing.shape == (5,)  # of the batch's size, perhaps
    assert model.count is homes["count"]  # also if its value is the same
    assert model.mean is homes["mean"]
    assert model.mean.tolist() == [1.0] * 3
    assert run(ours, {}).mean.tolist() == [0.0] * 3  # every pass begins from the replica's own


@pytest.mark.parametrize("other", [torch.ones(2), torch.ones(4), torch.ones(3, dtype=torch.float64), None])
def test_a_buffer_of_another_shape_or_type_is_refused(other: Any) -> None:
    with pytest.raises(
        Invalid, match="of another shape or type in the place of the buffer 'mean': use persistent=False"
    ):
        run(replica(Stateful(mean=torch.zeros(3))), {"mean": other})


@pytest.mark.parametrize("where", [0, 32])
def test_state_with_another_memory_is_put_back(where: int) -> None:
    """Wherever that lies, before its own or after it."""
    model = Stateful()
    model.follower = nn.Parameter(torch.zeros(16), requires_grad=False)
    ours = replica(model, state=["follower"])
    lane = ours.lane(training=True)
    ((parameter, _),) = lane._written
    memory = torch.arange(48.0)
    memory[16:32] = parameter.data
    parameter.data = memory[16:32]
    lane._written = [(parameter, parameter.data)]
    parameter.data = memory[where : where + 16]
    lane._settle()
    assert parameter.data_ptr() == memory[16:].data_ptr()
    assert memory[16:32].tolist() == [float(where + i) for i in range(16)]


def lane_of(tensor: nn.Parameter) -> Lane:
    module = nn.ModuleDict({"model": nn.Linear(2, 2)})
    module["model"].weight = tensor
    return Lane(module, Measure(), [], {"weight": tensor}, Making())


@pytest.mark.parametrize("where", [0, 32])
@pytest.mark.parametrize("trained", [True, False])
def test_a_weight_with_another_memory_is_refused(where: int, trained: bool) -> None:
    memory = torch.zeros(48)
    weight = nn.Parameter(memory[16:32], requires_grad=trained)
    lane = lane_of(weight)
    lane._check_fixed(False)
    weight.data = memory[where : where + 16]
    with pytest.raises(Written) as caught:
        lane._check_fixed(False)
    state = "use Trainer(state='weight') if it is state, or a persistent buffer"
    assert str(caught.value).endswith(OPTIMIZER if trained else state)


def test_only_what_is_not_trained_must_keep_its_version() -> None:
    """The optimizer writes the others, between two passes."""
    trained, frozen = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    with torch.no_grad():
        frozen.add_(1).add_(1)
    lanes = [lane_of(trained), lane_of(frozen)]
    for lane in lanes:
        lane._check_fixed(False)
    with torch.no_grad():
        for tensor in (trained, frozen):
            tensor.add_(1)
    lanes[0]._check_fixed(False)
    with pytest.raises(Written, match=r"'weight' was written to .*use Trainer\(state='weight'\)"):
        lanes[1]._check_fixed(False)
    with pytest.raises(Written, match="^a trained weight was written to"):
        lanes[0]._check_fixed(True)


def test_weights_may_have_been_written_many_times_before_a_pass() -> None:
    ours = replica(Stateful())
    for _ in range(300):
        ours.parameters.mul_(1)
    assert run(ours, {}).inner.weight._version > 256


def test_layers_that_were_put_into_evaluation_stay_in_it() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(), nn.Dropout())
    model[1].eval()
    lanes = replica(model).lane
    for training in (True, False, False, True):
        inner = lanes(training).module["model"]
        assert [layer.training for layer in inner] == [training, False, training]
    model.eval()
    assert [layer.training for layer in replica(model).lane(True).module["model"]] == [True, True, True]
    assert [layer.training for layer in replica(model).lane(False).module["model"]] == [False, False, False]


# Replicas


def deep() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[0].unused = nn.Linear(8, 8)
    return model


def examples(n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(n, 12, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 3


class Sums:
    """Takes what tasks give."""

    def __init__(self, bands: Any, size: int) -> None:
        self.bands, self.size, self.found = bands, size, dict[tuple[int, int], torch.Tensor]()

    def add(self, span: tuple[int, int], part: torch.Tensor, band: int = 0) -> None:
        self.found.setdefault(span, torch.full((self.size,), -1.0))[slice(*self.bands[band])] = part


def test_a_vector_in_bands_is_the_vector_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "LEAST", 64)
    ours = replica(deep(), shards=6)
    assert len(ours.bands) > 3
    pass_, spans = SimpleNamespace(feed=SimpleNamespace(resident={})), [(0, 1)] * 6
    batch = SimpleNamespace(
        shard=lambda shard, device: examples(5 + shard), keys=range(100, 106), pass_=pass_, spans=spans
    )
    shards = (2, 3, 5)
    expected = {(i, i + 1): ours.gradient(*examples(5 + i), 100 + i, i).tolist() for i in shards}
    added = {(2, 4): (torch.tensor(expected[2, 3]) + torch.tensor(expected[3, 4])).tolist(), (5, 6): expected[5, 6]}
    for bands, given in (
        (ours.bands, expected),
        ([(0, ours.size)], added),
    ):  # in one vector, neighbours are added at once
        sums = Sums(bands, ours.size)
        for task in [*ours.tasks(batch, range(2, 4), sums), *ours.tasks(batch, range(5, 6), sums)]:  # type: ignore[arg-type]
            task()
        assert {span: vector.tolist() for span, vector in sums.found.items()} == given


@pytest.mark.parametrize("shard", [0, 2, 5])
def test_what_a_shard_gives(shard: int) -> None:
    """Its gradient, the changes of the state times its examples, and its own loss and hits among zeros."""
    model, (x, y) = nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3)), examples()
    ours = replica(model, shards=6)
    vector, weights = ours.gradient(x, y, 1, shard), ours.layouts[0].size
    output = model(x)
    loss = nn.functional.cross_entropy(output, y, reduction="sum")
    loss.backward()
    for name, gradient in ours.named(vector[:weights]).items():
        assert torch.equal(torch.from_numpy(gradient.copy()), model.get_parameter(name).grad)
    assert [vector[gap].any().item() for gap in ours.layouts[0].padding] == [False] * 4
    reals, wholes = vector[weights : weights + 32], vector[weights + 32 : weights + 40]
    assert torch.equal(reals[:3], model[1].running_mean * 5)
    assert torch.equal(reals[16:19], (model[1].running_var - 1) * 5)
    assert wholes[0] == 5
    mine = [float(i == shard) for i in range(6)]
    assert vector[-12:-6].tolist() == [loss.item() * i for i in mine]
    assert vector[-6:].tolist() == [float((output.argmax(1) == y).sum()) * i for i in mine]


def test_evaluation_leaves_everything_as_it_was() -> None:
    model, (x, y) = deep(), examples()
    ours = replica(model)
    before = [vector.clone() for vector in ours.vectors]
    loss, hits = ours.evaluate(x, y, 3).tolist()
    with torch.no_grad():
        output = model.eval()(x)
    assert loss == nn.functional.cross_entropy(output, y, reduction="sum").item()
    assert hits == (output.argmax(1) == y).sum()
    assert all(map(torch.equal, before, ours.vectors))
    assert ours.evaluate(x, y, 4).tolist() == [loss, hits]


class Shared(nn.Module):
    """A buffer and a frozen parameter under two names each, a passing buffer, and a name for a loss's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen = nn.Linear(2, 3), nn.Parameter(torch.ones(2), requires_grad=False)
        self.also = self.frozen
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("number", self.count)
        self.register_buffer("passing", torch.full((3,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.frozen) + self.passing


def test_a_tensor_with_two_names_is_kept_once_and_known_by_both() -> None:
    model = Shared()
    ours = replica(model)
    assert ours.names == {
        "inner.weight": "inner.weight", "inner.bias": "inner.bias", "frozen": "frozen", "also": "frozen",
        "count": "count", "number": "count",
    }  # fmt: skip
    assert [layout.names for layout in ours.layouts] == [("inner.weight", "inner.bias"), ("count",)]
    assert list(ours.constants()) == ["frozen"]
    ours.take_constants({"frozen": np.array([3.0, 4.0], np.float32)})
    assert model.frozen.tolist() == [1.0, 1.0]  # the user's own
    assert ours.tensors()["also"].tolist() == [3.0, 4.0]
    made = ours.model()
    assert made.frozen is made.also
    assert (made.frozen.tolist(), made.passing.tolist(), made.inner.weight.requires_grad) == (
        [3.0, 4.0],
        [2.0] * 3,
        True,
    )
    made.passing.add_(1)
    assert model.passing.tolist() == [2.0] * 3
    assert ours.model().passing.tolist() == [2.0] * 3


def test_what_is_declared_as_state_is_state_if_it_is_not_trained() -> None:
    ours = replica(Shared(), state=["frozen", "inner.*"])
    assert [layout.names for layout in ours.layouts] == [("inner.weight", "inner.bias"), ("count", "frozen")]
    assert ours.constants() == {}


def test_parameters_for_an_optimizer() -> None:
    model = Shared()
    ours = replica(model)
    leaves, frozen = ours.leaves(), ours.frozen()
    assert [*leaves] == [id(model.inner.weight), id(model.inner.bias)]
    assert [*frozen] == [id(model.frozen)]
    assert [p.requires_grad for p in (*leaves.values(), *frozen.values())] == [True, True, False]
    ours.assign(torch.ones_like(ours.parameters))
    assert leaves[id(model.inner.bias)].tolist() == [1.0] * 3
    ours.replace([vector * 2 for vector in ours.vectors])
    assert leaves[id(model.inner.bias)].tolist() == [2.0] * 3


def test_parameters_of_others_are_named() -> None:
    """A closure holds the user's own layer, and another that no model has."""
    model, other = nn.Sequential(nn.Linear(12, 3)), nn.Linear(3, 3, bias=False)
    model[0].register_forward_hook(lambda layer, x, y: (other(y) if layer.training else y) + model[0].bias)
    ours = replica(model)
    assert sorted(ours.inside(*examples())[0]) == ["'0.bias'", "of shape (3, 3)"]


def test_shards_are_computed_side_by_side_unless_a_model_is_compiled() -> None:
    assert replica(nn.Linear(2, 3)).side_by_side is True
    compiled = nn.ModuleDict({"_orig_mod": nn.Linear(2, 3)})  # what torch.compile makes
    assert replica(nn.Sequential(compiled)).side_by_side is False


def test_a_computation_is_recorded_if_it_is_wanted_and_possible() -> None:
    rnn = nn.LSTM(2, 2, 2, dropout=0.5)
    ours = replica(nn.Linear(2, 3))
    assert ours._recorder.wanted is True
    found = [
        replica(model, capture=wish)._recorder.wanted for model in (rnn, nn.Linear(2, 3)) for wish in (True, False)
    ]
    assert found == [False, False, True, False]
    lane = ours.lane(training=True)
    ours.release()
    assert ours._recorder.wanted is False
    assert ours.lane(training=True) is not lane


class Renamed(nn.Linear):
    """Is saved under other names, and writes its weight when it is switched to training."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name.replace("weight", "kernel"): t for name, t in super().state_dict(*args, **options).items()}

    def train(self, mode: bool = True) -> nn.Module:
        self.weight.mul_(1 if mode else 0)
        return super().train(mode)


def test_a_weight_is_known_by_the_name_that_it_is_saved_under() -> None:
    model = Renamed(2, 3)
    with torch.no_grad():
        model.eval()
    ours = replica(model)
    assert ours.names == {"kernel": "weight", "bias": "bias", "weight": "weight"}
    assert ours.lane(training=True).module["model"].training  # a lane is made where no gradient is noted


# Noise of a GPU, without one


def test_a_gpu_draws_from_the_key_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", there)
    monkeypatch.setattr(torch, "default_generator", torch.Generator())
    for name, i in (("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        for generator in there:
            generator.manual_seed(7)
        noise.seed_gpu(5, torch.device(name))
        assert [generator.initial_seed() for generator in there] == [5 if j == i else 7 for j in range(2)]
        assert torch.default_generator.initial_seed() == 5


def on_a_gpu(ours: TorchReplica, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The replica believes to be on a GPU; what is done there."""
    done: list[str] = []
    ours._native = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr("samestep.backends.torch.replica.seed_gpu", lambda key, device: done.append(f"seeded {key}"))
    return done


def test_on_a_gpu_the_generator_is_seeded_for_each_vector_unless_a_recording_does_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, (x, y) = replica(nn.Linear(12, 3)), examples()
    expected = ours.gradient(x, y, 9, 1)
    done = on_a_gpu(ours, monkeypatch)
    assert torch.equal(ours.gradient(x, y, 9, 1), expected)
    assert done == ["seeded 9"]
    assert torch.equal(ours.drawn(ours.lane(training=True), x, y, 1), expected)
    assert done == ["seeded 9"]
    done.clear()
    told: dict[int, torch.Tensor] = {}
    bands = Bands(
        ours.weights.layout, [(0, 64), (64, 72)], torch.empty(72), lambda part, band: told.update({band: part})
    )
    pieces, numbers = ours._compute(ours.lane(training=True), x, y, 9, 1, bands)
    bands.finish([*pieces, *numbers])
    assert torch.equal(torch.cat([told[0], told[1]]), expected)
    assert done == ["seeded 9"]


def test_an_evaluation_on_a_gpu_is_seeded_and_recorded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, (x, y) = replica(nn.Linear(12, 3)), examples()
    expected = ours.evaluate(x, y, 9)
    done = on_a_gpu(ours, monkeypatch)

    def find(compute: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, seed: Callable[[], None]) -> Any:
        done.append("found")
        return compute if ours._recorder.wanted else None

    for wanted in (True, False):
        ours._recorder = SimpleNamespace(find=find, wanted=wanted)  # type: ignore[assignment]
        done.clear()
        assert torch.equal(ours.evaluate(x, y, 9), expected)
        assert done == ["found", "seeded 9"]
