"""Finds numbers in a text as people and models write them (1,234.0, \\$18, 9{,}500, \u22123, 3/4, 1e3), and
reads them exactly.

The results are Decimal and Fraction, never float: 0.30000000000000004 is not 0.3. A percent or currency sign
is a unit, so 50% is the number 50.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

MOST_PLACES = 10_000  # the digits of an exact Fraction; 1e999999999 written out would fill the memory

# Replacements that bring other notations into the plain one, in this order.
_PLAIN = [(re.compile(pattern), plain) for pattern, plain in (
    ("[\u2212\ufe63\uff0d]", "-"),  # typographic minus signs
    (r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1/\2"),
    (r"\\[dt]?frac\s*(\d)\s*(\d)(?!\d)", r"\1/\2"),
    (r"(?<=\d)\s*(?:\\times|\\cdot|\u00d7)\s*10\s*\^\s*\{?\s*([-+]?\d+)\s*\}?", r"e\1"),
    # Thousands separators: LaTeX's comma and thin spaces, typographic spaces, 1'000 and 1_000. A plain space
    # is a separator only if the next three digits begin with 0, because no number begins with 0.
    (r"(?<=\d)(?:\{,\}|\\[,;:! ]|~|[\u00a0\u2007\u2009\u202f'_])(?=\d{3}(?!\d))", ","),
    (r"(?<![\d.,])(\d{1,3}) (?=0\d\d(?!\d))", r"\1,"),
    # -$5 is -5, and 10-$5 ends with 5
    (r"(?:(?<!\d)([-+]))?\s{0,2}\\?[$\u20ac\u00a3\u00a5]\s{0,2}(?=\.?\d)", r" \1"),
)]
# A minus directly after a digit is a subtraction, not a sign. Commas are thousands separators.
_NUMBER = re.compile(
    r"(?<!\d)(?<!\w\.)(?:(?<!\d)-)?(?:(?<!/)\d+/0*[1-9]\d*(?![\d/]|\.\d)"
    r"|(?:\d{1,3}(?:,\d{3}(?!\d))+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<![\w.])\.\d+(?:[eE][-+]?\d+)?)"
)
_COUNTED = re.compile(r"\s?(?:\\?%|\\?[$\u20ac\u00a3\u00a5])$")
_BLANK = re.compile(r"(?<=\d) (?=\d{3}(?!\d))")
_WRAPPED = re.compile(r"\\boxed\s*\{(.*)\}|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\text\s*\{(.*)\}|\*\*(.*)\*\*",
                      re.DOTALL)


def last_number(text: str) -> str | None:
    """The last number in a text, in plain notation: a decimal (.5 and 1e-5 included) or a fraction of
    integers. None if there is none."""
    if whole := whole_number(text):
        return whole
    numbers = _NUMBER.findall(_plain(text))
    return numbers[-1].replace(",", "") if numbers else None


def whole_number(text: str) -> str | None:
    """The number in plain notation if the text is a single number, apart from dollar signs, boxes and a full
    stop around it; otherwise None."""
    text = text.strip().removesuffix(".")
    while wrapped := _WRAPPED.fullmatch(text):
        text = next(inner for inner in wrapped.groups() if inner is not None).strip().removesuffix(".")
    text = _COUNTED.sub("", text)
    text = _BLANK.sub(",", text)
    found = _NUMBER.fullmatch(_plain(text).strip().removeprefix("+"))
    return found[0].replace(",", "") if found else None


def value(text: str) -> Fraction | Decimal | None:
    """The exact value of a text that is a single number; None for any other text."""
    number = whole_number(text)
    if number is None:
        return None
    above, _, below = number.partition("/")
    try:
        parts = [Decimal(part) for part in (above, below or "1")]
    except InvalidOperation:  # the exponent exceeds Decimal's range
        return None
    if any(abs(part.adjusted()) > MOST_PLACES for part in parts):
        return None if below else parts[0]
    return Fraction(parts[0]) / Fraction(parts[1])


def _plain(text: str) -> str:
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text
