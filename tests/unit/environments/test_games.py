"""The environments that come along."""

import re

import pytest

from jaxfp8rl.environments.games import Calculator, Guess, next_key, reduced
from jaxfp8rl.errors import ConfigError


def test_a_number_is_found_by_halving():
    game = Guess(largest=7)
    for problem in game.problems():
        assert game.reset(problem) == ""
        low, high, turns = 1, 7, 0
        while True:
            turns += 1
            answer, reward, done = game.step(str((low + high) // 2))
            if done:
                break
            low, high = ((low + high) // 2 + 1, high) if answer == "+" else (low, (low + high) // 2 - 1)
        assert reward == 1 and turns <= 3 and str((low + high) // 2) == problem.answer
    assert game.step("?") == ("?", 0.0, False)


@pytest.mark.parametrize("operands", [2, 3, 4])
def test_the_calculator_follows_the_order_of_operations(operands):
    game = Calculator(operands=operands, max_operand=99, size=300)
    assert game.problems() and game.held_out() and not {p.id
                                                        for p in game.problems()} & {p.id
                                                                                     for p in game.held_out()}
    for problem in game.problems():
        assert int(problem.answer) == eval(re.sub(r"\b0+(?=\d)", "", problem.id)), problem
        game.reset(problem)
        left, rewards, done = problem.id, 0.0, False
        while not done:
            shown, reward, done = game.step(key := next_key(left))
            rewards += reward
            left = left if key == "=" else reduced(left)
            assert shown == left + "=" * (next_key(left) != "=")
        assert left == problem.answer and rewards == pytest.approx(1)
        assert game.reset(problem) == "" and game.step("9") == ("", 0.0, True)


def test_options_out_of_range_are_refused():
    for make in (lambda: Guess(largest=1), lambda: Calculator(operands=1),
                 lambda: Calculator(operations=("/",)),
                 lambda: Calculator(max_operand=0)):
        with pytest.raises(ConfigError, match="task.options"):
            make()
