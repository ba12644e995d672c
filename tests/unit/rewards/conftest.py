"""A task whose scorer misbehaves as each problem specifies."""

import pytest
from reward_cases import SCORER

from jaxfp8rl.data.tasks import make_task


@pytest.fixture
def task(tmp_path, monkeypatch):
    (tmp_path / "misbehaving.py").write_text(SCORER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return make_task("file", path="unused.jsonl", scorer="misbehaving:score")
