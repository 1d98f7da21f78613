"""find: which framework is installed, which one is the default, and which an object belongs to; none is imported."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.backends import find
from samestep.errors import BackendMissing, WrongType

VERSIONS = {"torch": "2.0", "jax": "0.5", "paddlepaddle": "3.0", "tensorflow-cpu": "2.21", "tensorflow-rocm": "2.20"}


def of(*modules: str) -> Any:
    """An object of classes of these modules, the first one derived from the second, and so on."""
    kind: Any = object
    for module in reversed(modules):
        kind = type("Thing", (kind,), {"__module__": module})
    return kind()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is in sys.modules: nothing at first, on a machine with these VERSIONS, where mxnet is a folder somewhere."""

    def version(name: str) -> str:
        if name not in VERSIONS:
            raise metadata.PackageNotFoundError(name)
        return VERSIONS[name]

    packages = {"tensorflow": ["tensorflow-cpu", "tensorflow-rocm"]}
    modules: dict[str, Any] = {}
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: packages)
    monkeypatch.setattr(find, "sys", SimpleNamespace(modules=modules))
    specs = {"tensorflow": "there", "mxnet": "there"}
    monkeypatch.setattr(find, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=specs.get)))
    return modules


def test_the_installed_version(loaded: dict[str, Any]) -> None:
    assert (find.installed("torch"), find.installed("jax"), find.installed("pad" + "dle")) == ("2.0", "0.5", "3.0")
    assert find.installed("tensorflow") == "2.21"  # by the name of the package that brings it
    assert find.installed("mxnet") == "?"
    assert find.installed("caffe") is None
    loaded["tensorflow"] = ModuleType("tensorflow")
    loaded["caffe"] = SimpleNamespace(__version__="1.0")
    assert (find.installed("tensorflow"), find.installed("caffe")) == ("?", "1.0")


def test_a_framework_is_checked_before_it_is_imported(loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "imported", lambda module, extra: SimpleNamespace(backend=(module, extra)))
    assert find.load("jax") == ("samestep.backends.jax.backend", "jax")  # type: ignore[comparison-overlap]
    with pytest.raises(WrongType, match="^no backend 'caffe': samestep has torch, jax, tensorflow, paddle, mxnet$"):
        find.load("caffe")
    monkeypatch.setattr(find, "installed", lambda name: None)
    with pytest.raises(
        BackendMissing,
        match=r"^'jax' is not installed; in a clone of samestep: pip install -c constraints.txt '\.\[jax\]'$",
    ):
        find.load("jax")
    loaded["samestep.backends.jax.backend"] = "there"
    assert find.load("jax") == ("samestep.backends.jax.backend", "jax")  # type: ignore[comparison-overlap]


def test_the_default_is_what_is_loaded_or_else_the_first_that_is_installed(
    loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "load", lambda name: name)
    there = ["tensorflow", "paddle", "mxnet"]
    monkeypatch.setattr(find, "installed", lambda name: name in there)
    assert find.default() == "tensorflow"
    loaded |= {"mxnet": 1, "paddle": 1}
    assert find.default() == "paddle"
    loaded.clear()
    there.clear()
    with pytest.raises(
        BackendMissing,
        match=r"^no framework is installed; in a clone of samestep: pip install -c constraints.txt '\.\[torch\]'$",
    ):
        find.default()


@pytest.mark.parametrize(
    ("missing", "package"), [("optax.tree", "optax"), ("zarr.core", "zarr"), (None, ""), ("samesteps", "samesteps")]
)
def test_a_package_that_is_missing_is_named_with_the_extra(
    missing: str | None, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(module: str) -> None:
        raise ModuleNotFoundError("no", name=missing)

    monkeypatch.setattr(find.importlib, "import_module", fails)
    with pytest.raises(BackendMissing) as error:
        find.imported("samestep.thing", "extra")
    assert (
        str(error.value)
        == f"{package!r} is not installed; in a clone of samestep: pip install -c constraints.txt '.[extra]'"
    )


def test_a_part_of_samestep_that_is_missing_is_a_mistake_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError, match="samestep.nothing") as error:
        find.imported("samestep.nothing.there", "extra")
    assert type(error.value) is ModuleNotFoundError


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        (["torch.nn.modules"], {"torch"}),
        (["mine", "jaxlib.xla"], {"jax"}),
        (["flax.nnx.module"], {"jax"}),
        (["optax._src"], {"jax"}),
        (["keras.src.models"], {"tensorflow"}),
        (["samestep.models.jax"], {"jax"}),
        (["samestep.schedules.kinds"], set()),
        (["torch.nn", "paddle.nn"], {"torch", "paddle"}),
        (["mine.torch"], set()),
        (["mine"], set()),
    ],
)
def test_the_frameworks_of_an_object_are_those_of_its_classes(modules: list[str], found: set[str]) -> None:
    thing = of(*modules)
    assert find.frameworks_of(thing) == find.frameworks_of(type(thing)) == found
    assert find.frameworks_of(partial(partial(type(thing), 1), 2)) == found


def test_the_framework_of_a_function_is_that_of_its_module() -> None:
    def function() -> None: ...

    function.__module__ = "keras.losses"
    assert find.frameworks_of(function) == find.frameworks_of(partial(function)) == {"tensorflow"}


def test_objects_of_another_framework_are_named() -> None:
    backend: Any = SimpleNamespace(name="torch")

    def factory() -> None: ...

    factory.__module__, factory.__qualname__ = "jax.made", "factory"
    find.check_mixed(backend, of("torch.nn"), loss=None, train_x=np.ones(1), optimizer=of("torch.optim", "paddle.x"))
    for thing, theirs in [
        (partial(factory, 1), "jax (jax.made.factory)"),
        (of("paddle.nn", "keras.src"), "paddle and tensorflow (paddle.nn.Thing)"),
    ]:
        with pytest.raises(WrongType) as error:
            find.check_mixed(backend, of("torch.nn"), loss=None, train_x=thing)
        takes = "a fit takes objects of one framework, NumPy arrays, and what samestep has itself"
        assert str(error.value) == f"train x is of {theirs} and the model of torch (torch.nn.Thing): {takes}"


def test_a_model_is_of_the_framework_that_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def __init__(self, name: str) -> None:
            self.name = name

        def owns(self, model: Any) -> bool:
            return self.name != "jax"

    monkeypatch.setattr(find, "load", Backend)
    assert find.of_model(of("jax.x", "paddle.nn", "mxnet.gluon")).name == "paddle"
    known = ", ".join(f"{name} ({models})" for name, models in find.FRAMEWORKS.items())
    for model, kind in ((of("jax.x"), "jax.x.Thing"), (3, "builtins.int")):
        with pytest.raises(WrongType) as error:
            find.of_model(model)
        assert str(error.value) == f"model must be a model of {known}; got {kind}"
