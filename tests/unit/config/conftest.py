"""A config's text as a file."""

import pytest


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return write
