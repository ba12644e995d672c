"""A run's directory and its page, for the tests of the report."""

from __future__ import annotations

import html
import html.parser
import json
from pathlib import Path

import numpy as np

from jaxfp8rl.monitors.jsonl import JsonlMonitor
from jaxfp8rl.monitors.report.sections import SECTIONS

ROOT = Path(__file__).parents[3]
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\"'{{ 7 * 7 }}"
VOID = {"meta", "link", "img", "br"}


def a_run(path: Path, steps: int = 12, seed: int = 0, lr: float = 1e-3, shift: float = 0.0, **row) -> Path:
    """A run directory as training writes it, with a completion that tries to break the page."""
    rng = np.random.default_rng(seed)
    metrics, samples = (JsonlMonitor(path / f"{name}.jsonl") for name in ("metrics", "samples"))
    metrics.log({"step": 0, "eval/reward_mean": 0.1, "eval/problems": 100})
    for step in range(1, steps + 1):
        keys = [m.key for s in SECTIONS for m in s.metrics if m.key != "eval/reward_mean"]
        keys += [f"time/{p}_s" for p in ("rollout", "reward", "score", "update", "publish")]
        record = {"step": step, **dict(zip(keys, rng.random(len(keys)))), "reward/std": 0.5,
                  "time/step_s": 6.0}
        record["reward/mean"] += shift
        metrics.log(record
                    | ({"eval/reward_mean": 0.5 + shift, "eval/problems": 100} if step == steps else {}))
        text = HOSTILE + "x" * 8
        n = len(text) + 1
        mu = -rng.random(n)
        samples.log({
            "step": step, "id": HOSTILE, "prompt": HOSTILE, "completion": text, "answer": "17", "reward": 1.0,
            "tokens": n,
            "finish_reason": "stop", "token_lengths": [1] * (n - 1) + [0], "rollout_logp": mu,
            "old_logp": mu + rng.choice([0, 0.02, -0.2, 0.9], n), "weights": rng.choice([1.0, 0.0], n), **row,
        })
    config = (f'[run]\ndir = "{path.name}"\nseed = {seed}\n'
              '[rollout]\nprompts_per_step = 8\nsamples_per_prompt = 4\n')
    (path
     / "config.toml").write_text(f"{config}[optim]\nlr = {lr}\n[task]\nsystem_prompt = '''{HOSTILE}'''\n")
    (path / "notes.txt").write_text(HOSTILE + "\n")
    passed = {"estimate": 0.75, "low": 0.5, "high": 0.875, "method": "wilson"}
    asked = {"step": steps, "problems": 100, "samples": 4, "pass_at_k": {"4": passed}}
    other = asked | {"step": 0, "greedy": True, "threshold": 0.5, "overrides": {"rollout.top_k": 7}}
    # a0's is of an older version
    (path / "eval.json").write_text(json.dumps(asked if path.name == "a0" else [asked, other]))
    return path


class Page(html.parser.HTMLParser):
    """Parses a page. Raises AssertionError for unbalanced tags; collects the contents by kind."""

    def __init__(self, path: Path):
        super().__init__()
        self.open, self.tags, self.text, self.raw = [], [], [], path.read_text(encoding="utf-8")
        self.feed(self.raw)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]
