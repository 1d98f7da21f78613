"""The same bits from several processes as from one: on the CPU, and on a GPU that they share."""

import sys
from pathlib import Path

import pytest

import samestep as ss
from conformance import suite
from samestep.processes import launch

if suite.BACKEND != "torch":
    pytest.skip("several processes are PyTorch's as yet", allow_module_level=True)
SCRIPT = str(Path(__file__).with_name("many_processes.py"))


@pytest.mark.parametrize(
    ("device", "count"),
    [
        ("cpu", 3),
        *(
            pytest.param("cuda", k, marks=pytest.mark.skipif(ss.num_gpus() == 0, reason="needs a CUDA GPU"))
            for k in (2, 4)
        ),
    ],
)
def test_several_processes_give_the_bits_of_one(device: str, count: int, tmp_path: Path) -> None:
    assert launch([sys.executable, SCRIPT, str(tmp_path), device], count) == 0
    for name in suite.MODELS:
        many = ss.Run.load(tmp_path / name)
        assert many.devices == [str(ss.Device.of(device))] * count
        suite.same(many, suite.fit(name, [device] * 2))
