"""The guide for those who come from elsewhere: its code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks, names = re.findall(r"^```python run\n(.*?)^```", GUIDE, re.M | re.S), dict[str, Any]()
    assert len(blocks) == 7
    for block in blocks:
        exec(compile(block, "docs/coming-from.md", "exec"), names)
    assert names["kept"].history[-1]["step"] == 15
    assert names["from_loader"].history[-1]["step"] == 7  # 200 examples, none dropped
