"""What docs/hub.md shows happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "hub.md"


@pytest.mark.usefixtures("world")
def test_the_page_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    shown = re.search(r"^```text\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert shown is not None and printed == [line.split(":")[0] for line in shown[1].splitlines()]
