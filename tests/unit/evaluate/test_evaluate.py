"""`jaxfp8rl eval`: a checkpoint's table says what its completions were, on problems that it was not trained
on."""

from __future__ import annotations

import dataclasses
import fcntl
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridges.api import EngineFormats
from bridges.engines.embedded_engine import EmbeddedEngine
from jaxfp8rl.checkpoint.read_only import Trained
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.cli.main import main
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.seen import digests_of, question, read_seen, write_seen
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.distributed.mesh import MeshLayout
from jaxfp8rl.errors import DataError
from jaxfp8rl.evaluate import pass_at_k as evaluate
from jaxfp8rl.evaluate.pass_at_k import check_held_out
from jaxfp8rl.monitors import console
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.rollout import adapters, scored_groups
from jaxfp8rl.rollout.problems import _not_in, load_data
from jaxfp8rl.rollout.scored_groups import Prompt

pytestmark = pytest.mark.usefixtures("quick_compile")

SMALL = ["--run.eval_problems", "12", "--rollout.kv_cache", "auto", "--precision.recipe", "bf16"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with a checkpoint of step 3, which is not the config's own start."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    cfg = load_config("demo", ["--run.dir", str(folder), *SMALL])
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(cfg))
    params = jax.tree.map(lambda p: 4 * p, starting_params(cfg, model_config(cfg)))
    state = init_state(params, make_optimizer(cfg.optim, 1), cfg.precision.compute_dtype)
    data = load_data(cfg, model_config(cfg))
    write_seen(folder, data.questions(cfg).seen)
    loop_state = {"stream": {}, "kv_amax": {}, "contents": data.contents(),
                  "tokenizer": data.tokenizer.fingerprint()}
    Checkpoints(folder / "checkpoints", 2).save(3, state, loop_state)
    return folder


def test_eval_writes_what_the_completions_were(run, capsys):
    """Every answer counts as right from a reward of 0 on: the table follows from the completions alone."""
    assert main(["eval", str(run), "--k", "1", "4", "--samples", "6", "--threshold", "0"]) == 0
    said = capsys.readouterr().out
    assert "12 held-out problems, 6 sampled at temperature 1" in said and "gate: learner and engine " in said
    (found,) = json.loads((run / "eval.json").read_text())
    assert (found["step"], found["problems"], found["samples"],
            found["engine"].split()[0]) == (3, 12, 6, "jax")
    assert [count
            for _, count in found["passed"]] == [6] * 12 and len({name for name, _ in found["passed"]}) == 12
    assert found["pass_at_k"].keys() == {"1", "4"} and found["pass_at_k"]["4"]["estimate"] == 1.0
    assert found["pass_at_k"]["4"]["low"] < 0.8  # twelve of twelve prove no more
    assert 0 <= found["reward_mean"] < 0.5
    assert 0 < found["gate/mean_gap"] <= found["gate/max_gap"] < 1e-3  # float32 on both sides


def split(run, *words):
    """(the ids of what a config like the run's trains on, those it holds out, what an evaluation by it is
    checked by)."""
    cfg = load_config(str(run / "config.toml"), words)
    data = load_data(cfg, model_config(cfg))
    ids = ({p.problem.id for p in prompts} for prompts in (data.train, data.held_out))
    return *ids, SimpleNamespace(contents=data.contents(), questions=data.questions(cfg),
                                 tokenizer=data.tokenizer)


def trained(run):
    """The run's checkpoint, as `check_held_out` asks for it."""
    _, _, parts = split(run)
    state = {"contents": parts.contents, "tokenizer": parts.tokenizer.fingerprint()}
    return Trained(None, None, {}, state, 3)


@pytest.mark.parametrize("seed", [["--run.seed", "1"], ["--seed", "1"]], ids=["run.seed", "--seed"])
def test_another_seed_samples_other_completions_of_the_same_problems(seed, run, tmp_path):
    """None of which was trained on, and 94% were when run.seed drew the split."""
    train, held_out, _ = split(run)
    records = []
    for name, words in (("a", []), ("b", seed)):
        assert main(["eval", str(run), "--out", str(tmp_path / name), "--threshold", "1e-9", *words]) == 0
        records += json.loads((tmp_path / name).read_text())
    ids = [[name for name, _ in record["passed"]] for record in records]
    assert ids[0] == ids[1] and not set(ids[0]) & train and set(ids[0]) <= held_out
    assert [record["seed"] for record in records] == [0, 1]


RESPLIT = {
    "another draw": ["--task.seed", "1"], "a larger share": ["--task.options.held_out_fraction", "0.8"],
    "the same operands, otherwise joined": ["--task.seed", "1", "--task.options.operations", '["*"]'],
}


@pytest.mark.parametrize("how", RESPLIT)
def test_what_a_run_was_trained_on_is_not_held_out(how, run):
    """However it is put: numbers in another order, or under another operation, are the same problem to a
    split."""
    train, _, _ = split(run)
    numbers = lambda ids: {tuple(sorted(name.replace("*", "+").split("+"))) for name in ids}
    _, held_out, parts = split(run, *RESPLIT[how])
    known = numbers(train) & numbers(held_out)
    assert len(known) / len(numbers(held_out)) > 0.8, "else there is nothing to refuse"
    with pytest.raises(DataError,
                       match=f"{len(known)} of {len(numbers(held_out))} held-out problems are "
                             f"among those that"):
        check_held_out(parts, trained(run), str(run))


def test_problems_that_a_run_never_met_are_evaluated_and_that_is_said(run, capsys):
    """A smaller share is a part of its own; other sums are another task."""
    check_held_out(split(run)[2], trained(run), str(run))
    assert capsys.readouterr().out == ""
    for key, value in (("held_out_fraction", "0.02"), ("operands", "2")):
        _, _, parts = split(run, f"--task.options.{key}", value)
        check_held_out(parts, trained(run), str(run))
        said = capsys.readouterr().out
        assert f"it was trained on none of the {len(parts.questions.held_out)}" in said


def test_a_run_that_does_not_say_what_it_was_trained_on_is_evaluated_on_its_own_split_alone(run, tmp_path):
    """As an earlier version began it."""
    check_held_out(split(run)[2], trained(run), str(tmp_path))
    with pytest.raises(DataError, match="without recording them"):
        check_held_out(split(run, "--task.seed", "1")[2], trained(run), str(tmp_path))
    (tmp_path / "trained_on.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match="trained_on.npy is damaged"):
        check_held_out(split(run, "--task.seed", "1")[2], trained(run), str(tmp_path))


def test_weights_that_a_run_or_a_warm_start_left_are_not_evaluated_on_what_they_know(run, tmp_path):
    """A shared warm start, or an export, is model.path of another run."""
    write_seen(tmp_path, read_seen(run))
    _, _, parts = split(run)
    cfg = load_config(str(run / "config.toml"))
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": str(tmp_path)})})
    shape = model_config(load_config(str(run / "config.toml")))
    data = load_data(cfg, shape)
    np.testing.assert_array_equal(data.questions(cfg).seen, parts.questions.seen)
    other = load_config(str(run / "config.toml"), ["--task.seed", "1"])
    with pytest.raises(DataError, match="held-out problems are among those that model.path, "):
        load_data(other, shape).questions(cfg)


@given(st.integers(2, 30), st.integers(2, 3), st.lists(st.sampled_from("+-*"), min_size=1, unique=True),
       st.integers(0, 99))
def test_no_sum_is_on_both_sides_of_a_split(max_operand, operands, operations, seed):
    task = make_task("arithmetic", max_operand=max_operand, operands=operands, operations=tuple(operations),
                     seed=seed, size=300)
    train, held_out = map(digests_of, (task.problems(), task.held_out()))
    assert np.intersect1d(train, held_out).size == 0 and train.size


def test_a_question_is_the_same_however_it_is_put(tmp_path, capsys):
    """And what training has, too, put otherwise, is left out of what is held out."""
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"})
    plain, told, other = Problem("a", "What is 2+2?\n",
                                 "4"), Problem("b", chat, "4"), Problem("c", "What is 2+3?", "5")
    assert question(plain) == question(told) != question(other)
    kept = _not_in([Prompt(plain, (1,))], [Prompt(told, (1,)), Prompt(other, (1,))])
    assert [p.problem.id for p in kept] == ["c"]
    assert "left out 1 held-out problems whose question is also trained on" in capsys.readouterr().out


def of_other_weights(patch):
    """Another checkpoint's, say: they arrive whole, and no proof of a publish finds them."""
    louder = lambda self, cfg, params, *rest: LearnerWeights.__init__(
        self, cfg, jax.tree.map(lambda p: 2 * p, params), *rest)
    patch.setattr(adapters, "LearnerWeights", type("Louder", (LearnerWeights,), {"__init__": louder}))


def of_a_nat_less(patch):
    """Says that each token was less likely than it was."""
    generate = EmbeddedEngine.generate
    less = lambda c: dataclasses.replace(c, logprobs=c.logprobs - 1)
    patch.setattr(EmbeddedEngine, "generate",
                  lambda self, asked: [[*map(less, group)] for group in generate(self, asked)])


def that_is_sick(patch):
    generate = EmbeddedEngine.generate
    spoilt = lambda c: dataclasses.replace(c, logprobs=np.full_like(c.logprobs, np.nan))
    patch.setattr(EmbeddedEngine, "generate",
                  lambda self, asked: [[*map(spoilt, group)] for group in generate(self, asked)])


@pytest.mark.parametrize(
    "broken, code, says",
    [
        (of_other_weights, 3, "learner and engine disagree at equal weights: mean gap"),
        (of_a_nat_less, 3, "learner and engine disagree at equal weights: mean gap 1 nats (limit 0.2)"),
        (that_is_sick, 5, "log-probability nan at token 0"),
    ],
)
def test_a_broken_engine_is_refused_as_a_run_refuses_it(broken, code, says, run, tmp_path, monkeypatch,
                                                        capsys):
    broken(monkeypatch)
    assert main(["eval", str(run), "--out", str(tmp_path / "found.json")]) == code
    said = capsys.readouterr()
    assert says in said.err and "next step: " in said.err and not (tmp_path / "found.json").exists()


def test_what_is_waited_for_is_said(run, tmp_path, monkeypatch, capsys):
    """A line of each phase when it ends, in the words of a training run."""
    monkeypatch.setattr(console, "SHORTEST_SHOWN", 0.0)
    assert main(["eval", str(run), "--out", str(tmp_path / "found.json")]) == 0
    said = capsys.readouterr().out
    order = [said.find(f"{phase}: ") for phase in ("loading the checkpoint", "reading the data", "publish",
                                                   "gate", "evaluate")]
    assert -1 not in order and order == sorted(order)


def test_memory_that_runs_out_is_explained_as_in_training(run, tmp_path, monkeypatch, capsys):
    def poll(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.00GiB.")

    monkeypatch.setattr(EmbeddedEngine, "poll", poll)
    assert main(["eval", str(run), "--out", str(tmp_path / "found.json")]) == 6
    said = capsys.readouterr().err
    assert "(phase: evaluate); the plan of an evaluation beside what was held:" in said
    assert "policy in float32" in said and "engine: keys and values" in said and "moments" not in said
    assert "GiB less" in said and said.rstrip().endswith("then run the command again")


@pytest.mark.slow
def test_the_gate_has_limits_of_its_own_and_takes_no_notice_of_top_k(run, tmp_path):
    """A learner's log-probabilities are those of the whole distribution: of the likeliest token alone they
    are not 0."""
    words = ["eval", str(run), "--out", str(tmp_path / "found.json")]
    assert main([*words, "--rollout.top_k", "1"]) == 0
    assert main([*words, "--gate.max_mean_gap", "1e-12"]) == 3
    assert [r["overrides"]
            for r in json.loads((tmp_path / "found.json").read_text())] == [{"rollout.top_k": 1}]


FACTS = {"reward_mean": 0.5, "gate/mean_gap": 0.01, "gate/max_gap": 0.1, "undefined": 0, "groups_rejected": 0}


@pytest.fixture
def stood_in(tmp_path, monkeypatch):
    """A run whose checkpoints and engine are stood in for; a test stands in for `sample`."""
    cfg = load_config("demo", ["--run.dir", str(tmp_path)])
    engine = SimpleNamespace(engine="jax", engine_version="1", formats=EngineFormats(*["bfloat16"] * 4))
    held_out = [SimpleNamespace(problem=SimpleNamespace(id=name)) for name in "ab"]
    parts = SimpleNamespace(held_out=held_out, engine=SimpleNamespace(capabilities=lambda: engine),
                            close=lambda: None)
    monkeypatch.setattr(evaluate, "config_of", lambda *_: cfg)
    monkeypatch.setattr(evaluate, "read_trained",
                        lambda cfg, source, step: Trained(cfg, None, {}, {}, step or 3))
    monkeypatch.setattr(evaluate, "build_run", lambda cfg, phase: parts)


def test_another_question_is_added_and_the_same_one_answered_anew(stood_in, tmp_path, monkeypatch):
    """As asked of a run, whose file an older version may have written."""
    counts = iter((1, 2, 3, 4))
    monkeypatch.setattr(evaluate, "sample", lambda *_: (np.array([next(counts)] * 2), FACTS))
    old = {"step": 1, "problems": 2, "samples": 4,
           "pass_at_k": {"1": {"estimate": 0.5, "low": 0.1, "high": 0.9}}}
    (tmp_path / "eval.json").write_text(json.dumps(old))
    for words in ([], ["--k", "2"], ["--rollout.temperature", "0.5"], []):
        assert main(["eval", str(tmp_path), "--samples", "4", *words]) == 0
    records = json.loads((tmp_path / "eval.json").read_text())
    assert [(r.get("overrides"), [*r["pass_at_k"]], r.get("passed", [[0, 0]])[0][1]) for r in records] == [
        (None, ["1"], 0), ({}, ["2"], 2), ({"rollout.temperature": 0.5}, ["1"], 3), ({}, ["1"], 4),
    ]


def test_two_evaluations_side_by_side_keep_both_records(stood_in, tmp_path, monkeypatch):
    """The second begins and ends while the first samples; the file is locked where it is read and written."""
    write, locked = evaluate.write_evaluations, []

    def sample(parts, trained, *_):
        if trained.step == 50:
            assert main(["eval", str(tmp_path), "--step", "75"]) == 0
        return np.array([1, 1]), FACTS

    def watched(path, records):
        with (tmp_path / "eval.json.lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.append(path)
        write(path, records)

    monkeypatch.setattr(evaluate, "sample", sample)
    monkeypatch.setattr(evaluate, "write_evaluations", watched)
    assert main(["eval", str(tmp_path), "--step", "50"]) == 0
    assert [r["step"]
            for r in json.loads((tmp_path / "eval.json").read_text())] == [75, 50] and len(locked) == 2


def test_what_has_no_score_and_what_the_engine_gave_up_is_said(run, tmp_path, monkeypatch, capsys):
    """Both count as failures; without them every completion passes a threshold of 0."""
    generate, score = scored_groups.generate, scored_groups.score

    def gives_one_up(*words, **options):
        kept, _ = generate(*words, **options)
        return kept[1:], ("request 0: the engine aborted it",)

    def without_three(*words):
        groups = score(*words)
        groups[0].rewards[:2] = groups[4].rewards[0] = np.nan
        return groups

    words = ["eval", str(run), "--samples", "2", "--threshold", "0", "--out", str(tmp_path / "found.json")]
    assert main(words) == 0
    assert "without a score" not in (said := capsys.readouterr().out) and "rejected" not in said
    monkeypatch.setattr(scored_groups, "generate", gives_one_up)
    monkeypatch.setattr(scored_groups, "score", without_three)
    assert main(words) == 0
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert (found["undefined"], found["groups_rejected"],
            sum(count for _, count in found["passed"])) == (3, 1, 24 - 2 - 3)
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["completions", "without", "a", "score:", "failed", "3"] in rows
    assert ["problems", "rejected:", "failed", "1"] in rows


def test_weights_that_a_folder_gives_are_committed_as_a_programs_results_are():
    placed = MeshLayout().place({"folder": np.ones(3, np.float32), "program": jnp.ones(2)})
    assert all(isinstance(x, jax.Array) and x.committed for x in placed.values())


@pytest.mark.slow
def test_the_weights_of_a_folder_are_evaluated(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    config = load_config(str(run / "config.toml")).model_dump(mode="json")
    (tmp_path / "folder.toml").write_text(dump_config(Config.model_validate(
        config | {"model": {"path": str(tmp_path / "model")}, "sft": config["sft"] | {"steps": 0}})))
    assert main(["eval", str(tmp_path / "folder.toml"), "--greedy", "--run.dir", str(tmp_path / "run")]) == 0
    assert "held-out problems, greedy" in capsys.readouterr().out


@pytest.mark.slow
def test_eval_of_a_config_writes_nothing_but_what_is_asked_for(tmp_path, capsys):
    words = ["eval", "demo", *SMALL, "--run.dir", str(tmp_path / "run"), "--greedy"]
    assert main([*words, "--out", str(tmp_path / "found.json")]) == 0
    assert "step 0: 12 held-out problems, greedy" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())[0]["greedy"] is True and not (
        tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words, says",
    [
        (["RUN", "--k", "4", "--samples", "2"], "pass@4 cannot be estimated: --samples 2 is less than --k 4"),
        (["RUN", "--k", "2", "--greedy"], "pass@2 cannot be estimated: --greedy gives one completion"),
        (["demo", "--step", "3"], "demo is a config, which has no checkpoints"),
        (["RUN", "--step", "2"], "no checkpoint of step 2\n  next step: --step 3"),
        (["RUN", "--task.options.held_out_fraction", "0.0"], "the task holds out no problems"),
        (["RUN", "--task.seed", "1"], " held-out problems are among those that "),
        (["RUN", "--model.tokenizer", "chars:0123456789+-*=x"],
         "the run was trained with another vocabulary"),
        (["RUN", "--out", "nowhere/x.json"], "--out nowhere/x.json: there is no folder nowhere"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(words, says, run, capsys):
    assert main(["eval", *(str(run) if w == "RUN" else w for w in words)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[1, 2]", '{"a": 1}', '[{"pass_at_k": [1]}]', "7"])
def test_a_file_of_something_else_is_refused_before_anything_is_sampled(
        content, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "config_of", lambda *_: pytest.fail("begun"))
    (tmp_path / "mine.json").write_text(content)
    assert main(["eval", "demo", "--out", str(tmp_path / "mine.json")]) == 2
    assert f"{tmp_path / 'mine.json'} is not a list of evaluations" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == content


def test_a_count_is_a_whole_number(capsys):
    assert main(["eval", "demo", "--k", "0"]) == 2
    assert "--k: 0 is not a positive integer" in capsys.readouterr().err
