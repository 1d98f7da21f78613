import sys, time, warnings, traceback, statistics
import numpy as np, torch
warnings.simplefilter("always")
import samestep as ss
from samestep.models import torch as models
from samestep.training.replicas import Replicas
from samestep.backends.torch import steps as S

def data(n, shape=(1, 28, 28), classes=10):
    r = np.random.default_rng(0)
    return ss.Data(train=(r.random((n, *shape), dtype=np.float32), r.integers(0, classes, n)))

def attempt(name, f):
    try:
        t = time.perf_counter(); out = f(); print(f"[{time.perf_counter()-t:5.1f}s] {name}: {out}", flush=True)
        return out
    except Exception:
        print(name, "FAILED"); traceback.print_exc(limit=-6, file=sys.stdout); sys.stdout.flush()

def same(name, make, d, variants, **kw):
    prints = {}
    for label, v in variants.items():
        def go():
            run = ss.Trainer(max_epochs=2, batch_size=100, progress=False, **{"devices": "cuda", **kw, **v}).fit(make(), d)
            return run.fingerprints
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            got = attempt(f"{name}/{label}", lambda: prints.setdefault(label, go()) and "ok")
        for one in w: print("   warning:", str(one.message)[:200])
    ok = [label for label in prints if prints[label] == prints[next(iter(prints))]]
    print(f"== {name}: same: {ok}  DIFFERENT: {[l for l in prints if l not in ok]}", flush=True)

def timing(name, make, d, batch, few, epochs=3, **kw):
    def go():

        out = []
        for data_ in (few, d):
            tr = ss.Trainer(max_epochs=epochs, batch_size=batch, progress=False, **{"devices": "cuda", "schedule": 0.05, **kw})
            torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
            host = []
            orig = S.TorchSteps.__call__
            def timed(self, batches, rates, t):
                b = time.perf_counter(); got = orig(self, batches, rates, t); host.append(((time.perf_counter()-b)/len(batches), len(batches)))
                return got
            S.TorchSteps.__call__ = timed
            try: run = tr.fit(make(), data_)
            finally: S.TorchSteps.__call__ = orig
            steps = run.history[0]["step"]
            out.append((steps, min(r["seconds"] for r in run.history[1:]), run))
        (n1, s1, _), (n2, s2, run) = out
        slope = 1e3 * (s2 - s1) / (n2 - n1)
        h = [x for x, n in host if n > 8][2:]
        return f"{1e3*s2/n2:.3f} ms/step whole; slope {slope:.3f} ms/step, fixed {1e3*s1-slope*n1:.1f} ms/epoch; first {run.history[0]['seconds']:.2f}s, host {1e6*statistics.median(h) if h else -1:.0f} us/step, peak {torch.cuda.max_memory_allocated()/2**30:.2f} GiB, {run.fingerprint[:12]}"
    return attempt(name, go)

part = sys.argv[1:]
print(torch.__version__, torch.cuda.get_device_name(0))
if "same" in part:
    d = data(530)
    ways = {"ops": dict(capture=False), "captured": {}, "streams1": dict(streams=1), "streams3": dict(streams=3), "k3": dict(devices=["cuda"]*3), "k8": dict(devices=["cuda"]*8)}
    same("lenet sgd momentum", models.lenet, d, ways, optimizer=ss.sgd(momentum=0.9))
    same("modern adam clip", models.lenet_modern, d, ways, optimizer=ss.adam(lr=1e-3), gradient_clip_val=0.1)
    same("mlp dropout adamw", lambda: models.mlp(dropout=0.3), d, ways, optimizer=ss.adamw(lr=1e-3))
    same("resnet bn", lambda: models.resnet18(width=4), data(330, (1, 40, 40)), ways)
    same("lenet torch.optim", models.lenet, d, {k: ways[k] for k in ("ops", "captured", "k3")}, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    same("lenet compile", models.lenet, d, {k: dict(v, compile=True) for k, v in ways.items() if k in ("ops", "captured", "k3")})
    same("mlp compile dropout", lambda: models.mlp(dropout=0.3), d, {k: dict(v, compile=True) for k, v in ways.items() if k in ("ops", "captured", "k3")}, optimizer=ss.adamw(lr=1e-3))
    same("resnet bn bf16 cl", lambda: models.resnet18(width=4), data(330, (1, 40, 40)), {k: dict(v, precision="bfloat16", memory_format="channels_last") for k, v in ways.items() if k in ("ops", "captured", "k3")})
    same("lenet tf32", models.lenet, d, {k: dict(v, precision="tf32") for k, v in ways.items() if k in ("ops", "captured", "k3")})
if "lenet" in part:
    d, few = data(256 * 235), data(256 * 47)
    for kw in (dict(shards=1), dict(), dict(compile=True, shards=1), dict(compile=True), dict(compile=True, precision="tf32"), dict(devices=["cuda"]*2), dict(devices=["cuda"]*8)):
        timing(f"lenet {kw}", models.lenet, d, 256, few, **kw)
def kernels(name, make, d, batch, **kw):
    from torch.profiler import profile, ProfilerActivity
    tr = ss.Trainer(max_epochs=2, batch_size=batch, progress=False, check_every=None, **{"devices": "cuda", "schedule": 0.05, **kw})
    orig = S.TorchSteps.__call__; seen = []
    def timed(self, batches, rates, t):
        if len(batches) == 64 and not seen and any(r and 8 in r.whole for r in self.recordings.values()):
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                got = orig(self, batches, rates, t); torch.cuda.synchronize()
            seen.append(p); return got
        return orig(self, batches, rates, t)
    S.TorchSteps.__call__ = timed
    try: tr.fit(make(), d)
    finally: S.TorchSteps.__call__ = orig
    if seen:
        ev = seen[0].key_averages()
        rows = sorted(((e.device_time_total, e.count, e.key) for e in ev), reverse=True)
        print(name, "kernels per step", sum(c for _, c, _ in rows) / 64, "busy us per step", sum(t for t, _, _ in rows) / 64)
        for t, c, k in rows[:28]: print(f"   {t/64:7.1f} us  {c/64:5.1f} x  {k[:110]}")
if "variants" in part:
    d, few = data(256 * 235), data(256 * 47)
    for kw in (dict(memory_format="channels_last", precision="tf32"), dict(memory_format="channels_last", precision="tf32", compile=True), dict(memory_format="channels_last", compile=True), dict(precision="bfloat16", compile=True), dict(precision="bfloat16", compile=True, memory_format="channels_last"), dict(precision="tf32", compile=True, shards=1), dict(precision="tf32", compile=True, shards=1, memory_format="channels_last")):
        timing(f"lenet {kw}", models.lenet, d, 256, few, **kw)
if "kernels" in part:
    d = data(256 * 235)
    attempt("k1", lambda: kernels("lenet 1", models.lenet, d, 256, shards=1))
    attempt("k1c", lambda: kernels("lenet 1 compiled", models.lenet, d, 256, shards=1, compile=True))
    attempt("k8c", lambda: kernels("lenet 8 compiled", models.lenet, d, 256, compile=True))
def gpts(name, make, vocabulary, length, batch, n=14, top=26, **kw):
    from torch.profiler import profile, ProfilerActivity
    r = np.random.default_rng(0)
    x = r.integers(0, vocabulary, (batch * 12, length + 1))
    d = ss.Data(train=(x[:, :-1].copy(), x[:, 1:].copy()))
    tr = ss.Trainer(max_epochs=2, batch_size=batch, progress=False, check_every=None, devices="cuda", precision="bfloat16", optimizer=ss.adamw(lr=1e-4), **kw)
    orig = S.TorchSteps.__call__; seen = []; calls = []
    def timed(self, batches, rates, t):
        calls.append(1)
        if t >= 14 and not seen:
            torch.cuda.synchronize(); b = time.perf_counter()
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                got = orig(self, batches, rates, t); torch.cuda.synchronize()
            seen.append((p, len(batches), time.perf_counter() - b)); return got
        return orig(self, batches, rates, t)
    S.TorchSteps.__call__ = timed
    try: run = tr.fit(make(), d)
    finally: S.TorchSteps.__call__ = orig
    p, k, wall = seen[0]
    rows = sorted(((e.device_time_total, e.count, e.key) for e in p.key_averages()), reverse=True)
    print(name, f"{1e3*run.history[-1]['seconds']/12:.2f} ms/step; profiled {k} steps; kernels per step", sum(c for _, c, _ in rows) / k, "busy ms per step", sum(t for t, _, _ in rows) / k / 1e3, "peak", torch.cuda.max_memory_allocated() >> 20)
    for t, c, key in rows[:top]: print(f"   {t/k:8.1f} us  {c/k:6.1f} x  {key[:120]}")
if "gpt" in part:
    import sys; sys.path.insert(0, "benchmarks")
    from speed import GPT
    torch.manual_seed(0)
    two = lambda: GPT(12, 768, 12, 50304, 1024)
    attempt("gpt2 8c", lambda: gpts("gpt2 8 compiled", two, 50257, 1024, 16, compile=True, top=3)); attempt("gpt2 8c4", lambda: gpts("gpt2 8 compiled 4 streams", two, 50257, 1024, 16, compile=True, top=3, streams=4))

if "more" in part:
    d, few = data(512 * 40, (3, 32, 32)), data(512 * 20, (3, 32, 32))
    for kw in (dict(shards=1), dict(), dict(shards=1, compile=True), dict(compile=True)):
        for p in ("tf32", "bfloat16"):
            timing(f"resnet18 {p} {kw}", lambda: models.resnet18(channels=3), d, 512, few, precision=p, memory_format="channels_last", optimizer=ss.sgd(momentum=0.9), **kw)
