"""A step without its tail: Seer's order, over-sampling with early stop, and continuation, by simulation and
by engine.

    jaxfp8rl bench rollout_tail                      # simulated; two minutes, CPU
    jaxfp8rl bench rollout_tail --measure 1.7b [--rows 64] [--groups 64] [--steps 8]

Simulated: completions of log-normal lengths (median 1,500 tokens, at most 8,192; those of a prompt alike), a
decoding step takes 8 ms and 0.06 ms a completion that is decoded, and the shipped order (`bridges.order`)
says whose turn it is. "continued" is a queue that stays full: what is not done when a step has its groups
goes on in the next. Each lever alone, and together with the order. What over-sampling drops is its bias: the
mean length of what is trained on beside what is drawn is in the records.

--measure: the embedded engine with Qwen3's shapes and random weights, whose completions have these lengths,
an eighth as long, whatever they say. "plain" waits for all of a step's, "continued" has twice as many in
flight and takes the first that are done. This part wants a Hopper GPU.

Needs no GPU.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import SHAPES, arguments, row, write
from bridges.order import Order, Waiting

STEP, EACH, SEEDS = 8e-3, 6e-5, 5  # seconds
PROMPT = 128


def lengths(seed: int, groups: int, n: int, correlation: float = 0.7, median: float = 1500,
            most: int = 8192) -> np.ndarray:
    """[G, n] tokens."""
    rng = np.random.default_rng(seed)
    z = np.sqrt(correlation) * rng.normal(size=(groups,
                                                1)) + np.sqrt(1 - correlation) * rng.normal(size=(groups, n))
    return np.ceil(np.clip(median * np.exp(0.9 * z), 1, most)).astype(int)


def simulated(x: np.ndarray, slots: int, how: str, need: int) -> tuple[float, list[int]]:
    """(seconds until `need` groups are done, these groups)."""
    groups, n = x.shape
    order, waiting = Order(how, 10**9), [Waiting(g, g * n + i) for g in range(groups) for i in range(n)]
    running: list[tuple[int, int]] = []  # (tokens decoded when it ends, place)
    left, decoded, seconds, done = np.full(groups, n), 0, 0.0, list[int]()
    while len(done) < need:
        if waiting and len(running) < slots:
            line = order.sorted(waiting)[: slots - len(running)]
            for i in line:
                order.started(waiting[i].group)
                heapq.heappush(running, (decoded + int(x.flat[waiting[i].age]), waiting[i].age))
            gone = set(line)
            waiting = [w for i, w in enumerate(waiting) if i not in gone]
        end, place = heapq.heappop(running)
        seconds += (end - decoded) * (STEP + EACH * (len(running) + 1))
        decoded = end
        group = place // n
        order.finished(group, int(x.flat[place]))
        left[group] -= 1
        if not left[group]:
            done.append(group)
    return seconds, done


def continued(x: np.ndarray, slots: int, per_step: int, how: str) -> float:
    """Seconds of a step, on average over all, if as many groups as a step has wait behind it."""
    seconds, done = simulated(x, slots, how, len(x) - per_step)
    return seconds / (len(done) / per_step)


def by_simulation() -> tuple[list[dict], list[dict]]:
    rows, records = [], []
    for slots in (64, 128, 256, 512):
        found: dict[str, list[tuple[float, float]]] = {}
        for seed in range(SEEDS):
            x = lengths(seed, 64, 8)
            plain, _ = simulated(x, slots, "fifo", 64)
            more = lengths(seed, 80, 8)
            many = np.concatenate([lengths(100 * seed + i, 64, 8) for i in range(6)])
            of = {"order": (simulated(x, slots, "longest", 64)[0], 1.0)}
            for how, also in (("fifo", ""), ("longest", " and order")):
                stopped, took = simulated(more, slots, how, 64)
                of[f"over-sampled 1.25{also}"] = stopped, float(more[took].mean() / more.mean())
                of[f"continued{also}"] = continued(many, slots, 64, how), 1.0
            for name, (seconds, length) in of.items():
                found.setdefault(name, []).append((plain / seconds, length))
        for name, both in found.items():
            gains, short = zip(*both)
            rows.append(row(f"simulated, 512 completions in {slots} slots", f"{name}, steps a second",
                            "of plain",
                            float(np.mean(gains)), 1.0, "all of a step awaited"))
            records.append({"slots": slots, "lever": name, "gains": gains, "trained_length_of_drawn": short})
    return rows, records


def by_engine(args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Seconds of a step of the embedded engine, plain and continued."""
    from benchmarks.engine_rollout import config_of, random_engine
    from bridges.api import GenRequest, SamplingParams

    like = argparse.Namespace(size=args.measure, layers=args.layers, new_tokens=2048, rows=args.rows, queue=2,
                              recipe="fp8")
    engine, *_ = random_engine(config_of("embedded", like))
    rng, per = np.random.default_rng(0), args.groups
    x = lengths(0, per * (args.steps + 2), 1, median=188, most=2048).ravel()
    asked = [GenRequest(str(i), tuple(rng.integers(0, 1000, PROMPT).tolist()), SamplingParams(int(t)), 1, i)
             for i, t in enumerate(x)]
    engine.generate(asked[:per])  # compiles
    began = time.perf_counter()
    for step in range(args.steps):
        engine.generate(asked[step * per : (step + 1) * per])
    plain = (time.perf_counter() - began) / args.steps
    engine.submit(asked[: 2 * per])
    done, taken, given, began = 0, 0, 2 * per, time.perf_counter()
    while done < args.steps * per:
        for completions in engine.poll():
            done, taken = done + 1, taken + sum(len(c.token_ids) for c in completions)
        if done // per > given // per - 2 and given < len(asked):
            engine.submit(asked[given : given + per])
            given += per
    on = (time.perf_counter() - began) / (done / per)
    engine.close()
    drawn = int(x[: args.steps * per].sum())
    case = f"Qwen3-{args.measure.upper()}, {per} completions in {args.rows} rows"
    return [row(case, "a step, continued", "s", on, plain, "all of a step awaited, same run", True)], [
        {"case": case, "plain": plain, "continued": on, "tokens": drawn,
         "taken_length_of_drawn": taken / done / (drawn / (args.steps * per))}]


def main() -> None:
    parser = arguments(__doc__, "rollout_tail")
    parser.add_argument("--measure", choices=SHAPES, help="by the embedded engine, with these shapes")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    rows, records = by_simulation()
    if args.measure:
        measured = by_engine(args)
        rows, records = rows + measured[0], records + measured[1]
    write(args.out, "rollout_tail", rows, args.plot, records=records)


if __name__ == "__main__":
    main()
