"""Where scorers of reasoning-gym reward what is no answer, and what is asked of an answer here before they
do.

Two kinds of fault. Credit for form: many give a little to whatever they can parse, or to a text in which the
answer stands somewhere, "None" for "on". And grades that read too much: NaN, a single digit, half a grid.
Some also evaluate what the model wrote as Python: it reaches them only where it is a plain literal, or an
expression of known functions.
"""

from __future__ import annotations

import ast
import collections
import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

# finite, and no matter of megabytes
UNSIGNED = r"(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,2})?"
NUMBER = "[-+]?" + UNSIGNED
FUNCTIONS = {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp",
             "log", "ln", "sqrt",
             "Abs", "erf"}
LARGEST_EXPONENT = 40
UNKNOWABLE = object()  # what is no JSON
Form = Callable[[str, dict], bool]


def score(dataset: Any, answer: str, entry: dict) -> float:
    """The score in [0, 1] that a generator, `dataset`, gives a non-empty answer to its `entry`; but 0 for one
    that has not the generator's form, or that earns no more than an empty one does, than a hundredth, or than
    what stands in CREDIT_FOR_FORM."""
    name = entry["metadata"].get("source_dataset", "")
    dataset = getattr(dataset, "datasets", {}).get(name, dataset)  # of a composite one
    if name in FORMS and answer != reference(entry).strip() and not FORMS[name](answer, entry):
        return 0.0
    value = float(dataset.score_answer(answer, entry))
    if value >= 1.0:
        return 1.0
    common = type(dataset).score_answer is _common_scorer()
    nothing = max(0.99 if common else 0.01, CREDIT_FOR_FORM.get(name, 0.0),
                  float(dataset.score_answer("", entry)))
    return value if value > nothing else 0.0  # NaN is not


def _common_scorer() -> Callable:
    from reasoning_gym.dataset import ProceduralDataset

    return ProceduralDataset.score_answer


def reference(entry: dict) -> str:
    """A right answer; "" where the generator has none, and where that is the answer."""
    if entry["answer"] is not None:
        return entry["answer"]
    facts = entry["metadata"]
    if facts.get("possible_answer"):  # graph_color
        return json.dumps(facts["possible_answer"])
    # rubiks_cube, propositional_logic
    return (facts.get("example_correct_answer") or facts.get("example_answer") or "").strip()


# What these give to any answer that can be parsed, and no right one gets; 0.99: all but a full score.
CREDIT_FOR_FORM = {
    "advanced_geometry": 0.05, "boxnet": 0.05, "countdown": 0.05, "fraction_simplification": 0.05,
    "knight_swap": 0.05,
    "palindrome_generation": 0.05, "figlet_font": 0.2, "pool_matrix": 0.1, "propositional_logic": 0.05,
    "tower_of_hanoi": 0.05,
    # Where the answer stands in a longer text: "Yes No", "1e999" for 9. The common scorer of 33 generators
    # does the same.
    "chain_sum": 0.99, "circuit_logic": 0.99, "manipulate_matrix": 0.99, "products": 0.99, "tsumego": 0.99,
    "coin_flip": 0.99,  # a shared beginning over the shorter number: 0 has all of it in common with 0.109375
}


def _matches(pattern: str) -> Form:
    compiled = re.compile(pattern, re.ASCII | re.DOTALL)
    return lambda answer, entry: compiled.fullmatch(answer.strip()) is not None


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda name: UNKNOWABLE)
    except (ValueError, RecursionError):
        return UNKNOWABLE


def _same_keys(answer: str, entry: dict) -> bool:
    """codeio: an object with the reference's keys, where that is an object; any object has some similarity to
    any other."""
    ours, theirs = _json(answer[max(answer.find("{"), 0):answer.rfind("}") + 1]
                         or answer), _json(entry["answer"])
    return not isinstance(theirs, dict) or (isinstance(ours, dict) and ours.keys() == theirs.keys())


def _near_probability(answer: str, entry: dict) -> bool:
    """coin_flip: the right one, within upstream's tolerance but not 0. Of any other the score is of its first
    digits alone."""
    if not re.fullmatch(rf"{UNSIGNED}|\d{{1,60}}/0*[1-9]\d{{0,60}}", answer.strip(), re.ASCII):
        return False
    right = Fraction(entry["answer"])
    return abs(Fraction(answer.strip()) - right) <= min(Fraction(1, 10_000), right / 20)


def _grid(answer: str, entry: dict) -> bool:
    """game_of_life: lists of the reference's shape. Upstream counts the cells that agree in whatever can be
    indexed."""
    ours, theirs = _json(answer), _json(entry["answer"])
    return isinstance(ours, list) and [_length(row) for row in ours] == [_length(row) for row in theirs]


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else -1


def _rows_of_digits(answer: str, entry: dict) -> bool:
    """Sudokus: as many rows of as many digits as the solution has, and no letters. Upstream finds four digits
    in 1e999."""
    rows = filter(None, (re.findall(r"\d", line, re.ASCII) for line in answer.splitlines()))
    return not re.search(r"[A-Za-z{}/\\]",
                         answer) and [*map(len, rows)] == [*map(len, entry["metadata"]["solution"])]


def _numbers(answer: str, entry: dict) -> bool:
    """number_sorting: a list of finite numbers. A list of NaN is sorted, and none of its elements more than 1
    off."""
    found = _json(answer.replace("'", '"'))
    return isinstance(found, list) and all(re.fullmatch(NUMBER, str(x).strip(), re.ASCII) for x in found)


def _of_same_letters(answer: str, entry: dict) -> bool:
    """spell_backward: letters of the word, half of them at least. Upstream compares place by place."""
    ours, word = (collections.Counter(text.lower()) for text in (answer, entry["answer"]))
    return ours <= word and 2 * ours.total() >= word.total()


def _word_of_length(answer: str, entry: dict) -> bool:
    """figlet_font: a word as long as the one that is shown, which upstream compares letter by letter."""
    word = answer.replace(" ", "").strip()
    return word.isalpha() and len(word) == len(entry["answer"].strip())


def _duration(answer: str, entry: dict) -> bool:
    """time_intervals: in the form asked for. Upstream reads the first number of "1 2 3" as days, and grades
    by nearness."""
    if answer.strip() == entry["answer"].removesuffix(" days"):
        return True
    clock = r"\d{1,4}:\d{1,2}(:\d{1,2}(\.\d{1,9})?)?"
    forms = {"date": r"-?\d{1,9} days?", "time": clock}
    kind = entry["metadata"]["task_type"].split("_")[0]
    return re.fullmatch(forms.get(kind, rf"-?\d{{1,9}} days?,? {clock}"), answer.strip(),
                        re.ASCII) is not None


def _literal(answer: str, entry: dict) -> bool:
    """Upstream evaluates what is not right as it stands, with its own variables in reach: `oracle_answer` had
    a score."""
    if answer.strip() in (entry["answer"].strip(), *entry["metadata"].get("valid_answers", ())):
        return True
    try:
        return isinstance(ast.literal_eval(answer), list | tuple)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _sum_of_given(answer: str, entry: dict) -> bool:
    """An expression of + - * / and each of the given numbers once. puzzle24 takes any four numbers; both
    evaluate 9**9**9."""
    given = sorted(entry["metadata"]["numbers"])
    if re.search(r"\*\*|//|\d{10}", answer) or not re.fullmatch(r"[\d\s()+*/.-]{1,500}", answer, re.ASCII):
        return False
    return sorted(map(float, re.findall(r"\d+(?:\.\d+)?", answer))) == given


def _twenty_four(answer: str, entry: dict) -> bool:
    """puzzle24: upstream takes 24.5 for 24, too."""
    return _sum_of_given(answer, entry) and _exact(answer) == 24


def _exact(expression: str) -> Fraction | None:
    """The value of an expression of + - * / and whole numbers."""

    def of(node: ast.AST) -> Fraction:
        match node:
            case ast.Constant(value=int(x)):
                return Fraction(x)
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return -of(x)
            case ast.UnaryOp(op=ast.UAdd(), operand=x):
                return of(x)
            case ast.BinOp(left=a, op=op, right=b):
                x, y = of(a), of(b)
                return x + y if isinstance(op, ast.Add) else x - y if isinstance(op, ast.Sub) else (
                    x * y if isinstance(op, ast.Mult) else x / y)
        raise ValueError(ast.dump(node))

    try:
        return of(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, SyntaxError, MemoryError, RecursionError, ZeroDivisionError):
        return None


def _within(x: object, bound: float) -> bool:
    """Whether x is a number, which a boolean is not, of at most this size."""
    return type(x) in (int, float) and isinstance(x, int | float) and abs(x) <= bound


def _algebra(answer: str, entry: dict) -> bool:
    """Upstream evaluates the answer: integrate(...) and expand(...) had full marks, and 9**9**9 never
    ended."""
    try:
        tree = ast.parse(answer.strip(),
                         mode="eval") if len(answer) <= 4 * len(entry["answer"]) + 400 else None
        return tree is not None and all(map(_is_algebra, ast.walk(tree))) and _powers(tree.body) <= 2
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _is_algebra(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in FUNCTIONS
        case ast.BinOp(op=ast.Pow(), right=power):
            return not _powers(power) and all(
                _within(x.value, LARGEST_EXPONENT) for x in ast.walk(power) if isinstance(x, ast.Constant))
        case ast.Constant(value=x):
            return _within(x, 1e30) and x != 1e30
        case ast.Name(id=name):
            return re.fullmatch(r"[A-Za-z]{1,8}\d?", name) is not None
    return isinstance(node, ast.Expression | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop
                      | ast.expr_context)


def _powers(node: ast.AST) -> int:
    """How deep powers stand in powers."""
    own = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
    return own + max((_powers(child) for child in ast.iter_child_nodes(node)), default=0)


def _proposition(answer: str, entry: dict) -> bool:
    """propositional_logic: a formula. Upstream takes any text for a variable, of which anything follows if
    premises clash."""
    text, before = re.sub(r"\s", "", answer[:1000]), None
    while text != before:
        before, text = text, re.sub(r"\u00ac[A-Z]|\([A-Z]\)|[A-Z][\u2227\u2228\u2192\u2194][A-Z]", "P", text)
    return re.fullmatch("[A-Z]", text) is not None


def _roots(answer: str, entry: dict) -> bool:
    """polynomial_equations: finite numbers. What is none is passed over, and no number is right where there
    is no real root."""
    return re.fullmatch(rf"{NUMBER}(\s*,\s*{NUMBER})*", answer.strip(), re.ASCII) is not None


def _matrix(answer: str, entry: dict) -> bool:
    """pool_matrix: finite numbers; NaN has the right shape."""
    return all(re.fullmatch(NUMBER, cell, re.ASCII) for cell in answer.split())


FORMS: dict[str, Form] = {
    "binary_matrix": _literal, "n_queens": _literal, "spiral_matrix": _literal, "string_insertion": _literal,
    "codeio": _same_keys,
    "coin_flip": _near_probability,
    # abs(NaN) is no distance: exp of it was taken for 1.
    "complex_arithmetic": _matches(
        rf"\(?\s*(?:{NUMBER}|[-+]?\s*(?:{UNSIGNED})?\s*[ij]|{NUMBER}\s*[-+]\s*(?:{UNSIGNED})?\s*[ij])\s*\)?"),
    "countdown": _sum_of_given,
    "figlet_font": _word_of_length,
    "futoshiki": _rows_of_digits, "mini_sudoku": _rows_of_digits, "sudoku": _rows_of_digits,
    "game_of_life": _grid,
    # bool("abc") is True
    "game_of_life_halting": lambda answer, entry: answer.strip().casefold() == entry["answer"].casefold(),
    # \b before a minus: the number that upstream finds in -5 is 5.
    "gsm_symbolic": _matches(NUMBER),
    "intermediate_integration": _algebra, "polynomial_multiplication": _algebra,
    "simple_integration": _algebra,
    "number_sorting": _numbers,
    "polynomial_equations": _roots,
    "pool_matrix": _matrix,
    "propositional_logic": _proposition,
    "puzzle24": _twenty_four,
    "quantum_lock": _matches(r"[A-Ca-c](?:(?:\s|,|\u2192|->)+[A-Ca-c])*"),
    "rectangle_count": _matches(r"[1-9]\d{0,8}"),  # none is 0, which was near 1
    "rubiks_cube": _matches(r"(?:[FBLRUDfblrudMESxyz]w?['2]?\s*){1,1000}"),
    "rush_hour": _matches(r"(?:[A-Za-z][+-]\d{1,2}[\s,]*){1,1000}"),
    "spell_backward": _of_same_letters,
    "time_intervals": _duration,
}

