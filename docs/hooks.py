"""What the site has besides the pages in this folder: the measurements they link to, the examples that
tutorials show, and the configuration reference."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def on_config(config):
    """A page that nobody put into the list of pages stands under "More"."""
    named = set(re.findall(r"[\w-]+\.md", str(config.nav)))
    rest = sorted(p.name for p in Path(config.docs_dir).glob("*.md") if p.name not in named)
    if rest:
        config.nav.append({"More": rest})
    if pages := sorted(f"experiments/{p.name}" for p in Path(config.docs_dir).glob("experiments/*.md")):
        config.nav.append({"Results of experiments": pages})
    return config


def on_files(files: Files, config) -> Files:
    for path in sorted(RESULTS.glob("*.json")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, "configuration.md", content=configuration()))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    """Prepare a page for the site.

    - A paragraph that is only a link to an example shows the file.
    - Links to measurements lead to the site's copies.
    - A link to another file of the repository becomes the name of the file.
    """
    markdown = re.sub(r"^\[examples/\w+\.py\]\(\.\./(examples/\w+\.py)\)$", _listing, markdown, flags=re.M)
    markdown = markdown.replace("](../benchmarks/results/", "](results/")
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)


def _listing(link: re.Match) -> str:
    return f'```python title="{link[1]}"\n{(ROOT / link[1]).read_text(encoding="utf-8")}```'


def configuration() -> str:
    """Every setting with its type, default and meaning, as `jaxfp8rl config` knows them."""
    sys.path.insert(0, str(ROOT))
    from jaxfp8rl.cli.settings import settings
    from jaxfp8rl.config.schema import SECTIONS

    parts = [_PREFACE]
    for name, section in SECTIONS.items():
        rows = [_row(s) for s in settings() if s.section == name]
        parts.append(f"## {name}\n\n{section.__doc__}\n\n| setting | default | type and meaning "
                     f"|\n|---|---|---|\n"
                     + "\n".join(rows))
    return "\n\n".join(parts)


_PREFACE = """\
# Configuration

A config is a TOML file with these sections, or the name of one in `configs/`. On the command line any setting
can be overridden: `--section.setting VALUE`. `jaxfp8rl config NAME` prints the same list with a run's values,
and `jaxfp8rl config --find WORD` searches it. This page is made from `jaxfp8rl/config/schema.py`.
"""


def _row(setting) -> str:
    kind, meaning = (text.replace("|", "\\|") for text in (setting.kind, setting.description))
    return f"| `{setting.key}` | {_default(setting.default)} | *{kind}*<br>{meaning} |"


def _default(value: str | None) -> str:
    return {None: "required", "": "absent"}.get(value, f"`{value}`")
