"""Stricter checks of answers before reasoning-gym scores them, because some of its scorers reward wrong
answers.

There are two kinds of faults. Some scorers give a little credit to any answer that parses, or to any text
that contains the answer ("None" for "on"). Others accept too much: NaN, a single digit, half a grid. Some
also evaluate the model's text as Python; here it reaches them only if it is a plain literal or an expression
of known functions.
"""

from __future__ import annotations

import ast
import collections
import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

# A finite number of bounded length.
UNSIGNED = r"(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,2})?"
NUMBER = "[-+]?" + UNSIGNED
FUNCTIONS = {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp",
             "log", "ln", "sqrt",
             "Abs", "erf"}
LARGEST_EXPONENT = 40
UNKNOWABLE = object()  # stands for text that is not JSON
Form = Callable[[str, dict], bool]


def score(dataset: Any, answer: str, entry: dict) -> float:
    """The score in [0, 1] that the generator `dataset` gives to a non-empty answer to its `entry`.

    The score is 0 if the answer does not have the generator's form, or if it earns no more than an empty
    answer does, than 0.01, or than the generator's value in CREDIT_FOR_FORM.
    """
    name = entry["metadata"].get("source_dataset", "")
    dataset = getattr(dataset, "datasets", {}).get(name, dataset)  # a composite's part
    if name in FORMS and answer != reference(entry).strip() and not FORMS[name](answer, entry):
        return 0.0
    value = float(dataset.score_answer(answer, entry))
    if value >= 1.0:
        return 1.0
    common = type(dataset).score_answer is _common_scorer()
    nothing = max(0.99 if common else 0.01, CREDIT_FOR_FORM.get(name, 0.0),
                  float(dataset.score_answer("", entry)))
    return value if value > nothing else 0.0  # 0 for NaN too


def _common_scorer() -> Callable:
    from reasoning_gym.dataset import ProceduralDataset

    return ProceduralDataset.score_answer


def reference(entry: dict) -> str:
    """A correct answer; "" if the generator gives none, or if the empty text is the answer."""
    if entry["answer"] is not None:
        return entry["answer"]
    facts = entry["metadata"]
    if facts.get("possible_answer"):  # graph_color
        return json.dumps(facts["possible_answer"])
    # rubiks_cube, propositional_logic
    return (facts.get("example_correct_answer") or facts.get("example_answer") or "").strip()


# The credit that these generators give to any answer that parses, and never to a correct one. With 0.99 only
# a full score counts.
CREDIT_FOR_FORM = {
    "advanced_geometry": 0.05, "boxnet": 0.05, "countdown": 0.05, "fraction_simplification": 0.05,
    "knight_swap": 0.05,
    "palindrome_generation": 0.05, "figlet_font": 0.2, "pool_matrix": 0.1, "propositional_logic": 0.05,
    "tower_of_hanoi": 0.05,
    # Credit for a longer text that contains the answer: "Yes No", "1e999" for 9. The common scorer of 33
    # generators does the same.
    "chain_sum": 0.99, "circuit_logic": 0.99, "manipulate_matrix": 0.99, "products": 0.99, "tsumego": 0.99,
    "coin_flip": 0.99,  # scores the common prefix of two numbers: "0" is a full prefix of 0.109375
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
    """codeio: an object with the reference's keys, if the reference is an object. Upstream finds some
    similarity between any two objects."""
    ours, theirs = _json(answer[max(answer.find("{"), 0):answer.rfind("}") + 1]
                         or answer), _json(entry["answer"])
    return not isinstance(theirs, dict) or (isinstance(ours, dict) and ours.keys() == theirs.keys())


def _near_probability(answer: str, entry: dict) -> bool:
    """coin_flip: a number within upstream's tolerance of the answer, but not 0. Upstream scores any other
    number by its first digits."""
    if not re.fullmatch(rf"{UNSIGNED}|\d{{1,60}}/0*[1-9]\d{{0,60}}", answer.strip(), re.ASCII):
        return False
    right = Fraction(entry["answer"])
    return abs(Fraction(answer.strip()) - right) <= min(Fraction(1, 10_000), right / 20)


def _grid(answer: str, entry: dict) -> bool:
    """game_of_life: lists of the reference's shape. Upstream counts equal cells in anything that can be
    indexed."""
    ours, theirs = _json(answer), _json(entry["answer"])
    return isinstance(ours, list) and [_length(row) for row in ours] == [_length(row) for row in theirs]


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else -1


def _rows_of_digits(answer: str, entry: dict) -> bool:
    """Sudokus: as many rows with as many digits as the solution, and no letters. Upstream finds four digits
    in 1e999."""
    rows = filter(None, (re.findall(r"\d", line, re.ASCII) for line in answer.splitlines()))
    return not re.search(r"[A-Za-z{}/\\]",
                         answer) and [*map(len, rows)] == [*map(len, entry["metadata"]["solution"])]


def _numbers(answer: str, entry: dict) -> bool:
    """number_sorting: a list of finite numbers. To upstream a list of NaN is sorted, and no element differs
    by more than 1."""
    found = _json(answer.replace("'", '"'))
    return isinstance(found, list) and all(re.fullmatch(NUMBER, str(x).strip(), re.ASCII) for x in found)


def _of_same_letters(answer: str, entry: dict) -> bool:
    """spell_backward: letters of the word, at least half of them. Upstream compares position by position."""
    ours, word = (collections.Counter(text.lower()) for text in (answer, entry["answer"]))
    return ours <= word and 2 * ours.total() >= word.total()


def _word_of_length(answer: str, entry: dict) -> bool:
    """figlet_font: a word of the same length as the one shown. Upstream compares letter by letter."""
    word = answer.replace(" ", "").strip()
    return word.isalpha() and len(word) == len(entry["answer"].strip())


def _duration(answer: str, entry: dict) -> bool:
    """time_intervals: a duration in the requested form. Upstream reads the first number of "1 2 3" as days,
    and grades by distance."""
    if answer.strip() == entry["answer"].removesuffix(" days"):
        return True
    clock = r"\d{1,4}:\d{1,2}(:\d{1,2}(\.\d{1,9})?)?"
    forms = {"date": r"-?\d{1,9} days?", "time": clock}
    kind = entry["metadata"]["task_type"].split("_")[0]
    return re.fullmatch(forms.get(kind, rf"-?\d{{1,9}} days?,? {clock}"), answer.strip(),
                        re.ASCII) is not None


def _literal(answer: str, entry: dict) -> bool:
    """The answer itself, or a literal list or tuple. Upstream evaluates any other answer with its own
    variables in scope, so that `oracle_answer` scored."""
    if answer.strip() in (entry["answer"].strip(), *entry["metadata"].get("valid_answers", ())):
        return True
    try:
        return isinstance(ast.literal_eval(answer), list | tuple)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _sum_of_given(answer: str, entry: dict) -> bool:
    """An expression of + - * / with each of the given numbers once. Upstream's puzzle24 accepts any four
    numbers, and both generators evaluate 9**9**9."""
    given = sorted(entry["metadata"]["numbers"])
    if re.search(r"\*\*|//|\d{10}", answer) or not re.fullmatch(r"[\d\s()+*/.-]{1,500}", answer, re.ASCII):
        return False
    return sorted(map(float, re.findall(r"\d+(?:\.\d+)?", answer))) == given


def _twenty_four(answer: str, entry: dict) -> bool:
    """puzzle24: an expression that is exactly 24. Upstream also accepts 24.5."""
    return _sum_of_given(answer, entry) and _exact(answer) == 24


def _exact(expression: str) -> Fraction | None:
    """The exact value of an expression of + - * / and integers; None if it is not such an expression."""

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
    """Whether x is a number (not a boolean) with an absolute value of at most `bound`."""
    return type(x) in (int, float) and isinstance(x, int | float) and abs(x) <= bound


def _algebra(answer: str, entry: dict) -> bool:
    """A bounded algebraic expression. Upstream evaluates the answer: integrate(...) and expand(...) got full
    marks, and 9**9**9 never ended."""
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
    """The depth to which powers are nested in the node."""
    own = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
    return own + max((_powers(child) for child in ast.iter_child_nodes(node)), default=0)


def _proposition(answer: str, entry: dict) -> bool:
    """propositional_logic: a formula. Upstream accepts any text as a variable, and anything follows from
    contradictory premises."""
    text, before = re.sub(r"\s", "", answer[:1000]), None
    while text != before:
        before, text = text, re.sub(r"\u00ac[A-Z]|\([A-Z]\)|[A-Z][\u2227\u2228\u2192\u2194][A-Z]", "P", text)
    return re.fullmatch("[A-Z]", text) is not None


def _roots(answer: str, entry: dict) -> bool:
    """polynomial_equations: finite numbers. Upstream skips any text that is not a number, and accepts no
    number where there is no real root."""
    return re.fullmatch(rf"{NUMBER}(\s*,\s*{NUMBER})*", answer.strip(), re.ASCII) is not None


def _matrix(answer: str, entry: dict) -> bool:
    """pool_matrix: finite numbers. Upstream accepts NaN in the right shape."""
    return all(re.fullmatch(NUMBER, cell, re.ASCII) for cell in answer.split())


FORMS: dict[str, Form] = {
    "binary_matrix": _literal, "n_queens": _literal, "spiral_matrix": _literal, "string_insertion": _literal,
    "codeio": _same_keys,
    "coin_flip": _near_probability,
    # Upstream's min(1.0, exp(-distance)) is 1.0 for a distance of NaN.
    "complex_arithmetic": _matches(
        rf"\(?\s*(?:{NUMBER}|[-+]?\s*(?:{UNSIGNED})?\s*[ij]|{NUMBER}\s*[-+]\s*(?:{UNSIGNED})?\s*[ij])\s*\)?"),
    "countdown": _sum_of_given,
    "figlet_font": _word_of_length,
    "futoshiki": _rows_of_digits, "mini_sudoku": _rows_of_digits, "sudoku": _rows_of_digits,
    "game_of_life": _grid,
    # Upstream compares bool(answer), and bool("abc") is True.
    "game_of_life_halting": lambda answer, entry: answer.strip().casefold() == entry["answer"].casefold(),
    # Upstream's pattern has \b before the minus, so it finds 5 in -5.
    "gsm_symbolic": _matches(NUMBER),
    "intermediate_integration": _algebra, "polynomial_multiplication": _algebra,
    "simple_integration": _algebra,
    "number_sorting": _numbers,
    "polynomial_equations": _roots,
    "pool_matrix": _matrix,
    "propositional_logic": _proposition,
    "puzzle24": _twenty_four,
    "quantum_lock": _matches(r"[A-Ca-c](?:(?:\s|,|\u2192|->)+[A-Ca-c])*"),
    # never 0, which upstream gives credit for its distance to 1
    "rectangle_count": _matches(r"[1-9]\d{0,8}"),
    "rubiks_cube": _matches(r"(?:[FBLRUDfblrudMESxyz]w?['2]?\s*){1,1000}"),
    "rush_hour": _matches(r"(?:[A-Za-z][+-]\d{1,2}[\s,]*){1,1000}"),
    "spell_backward": _of_same_letters,
    "time_intervals": _duration,
}

