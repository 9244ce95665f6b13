r"""Reads numbers in plain text and LaTeX: `-$1,200`, `9 500`, `3 1/2`, `\frac12`, `½`, `2 million`.

A hyphen after a letter or digit is no sign, nor is the dash of "so - 3". Currency, units, percent
and bold print are ignored. `1,2`, `10:30`, `10-15` and `2 * 3 = 6 in step 1` have no value, nor
have several answers, such as `5 or 6`: a model would learn to hedge.
"""

import re
import unicodedata
from fractions import Fraction

LONGEST = 1_000  # characters that are read, so that no pattern takes long; ours
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
SCALES |= {"trillion": 10**12}

SPELLINGS = (  # pattern -> what replaces it, in this order
    (r"<<[^<>]*>>", ""),  # GSM8K's annotations
    (r"(?<=[0-9])[kK]\b(?!-)", " thousand"),
    (r"(?<=[0-9])M\b(?!-)", " million"),
    # Units before an operator of an equation: 5 apples + 3 apples = 8.
    (r"(?<=[0-9])(?:(?:\s+|/)(?!x\b)[A-Za-z]+){1,3}(?=\s*(?:=|[-+*/][^=]*=))", ""),
    (r"[\u2010-\u2013\u2212]", "-"),
    (r"\u2044", "/"),  # of ½
    (r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))", r"\1\2/\3\4"),
    (r"(?<=[0-9])(?:,\\!|\{,\}|\\[,;: ]|~)(?=[0-9])", ","),
    (r"\\?\b(?:times|cdot|div)\b(?=[\s$\\]*[0-9])|[×·÷]", "*"),
    (r"\\approx|≈", "="),
    (r"\b(?:minus|negative)\s+", "-"),
    # "- 3" is negative at the start and after an opening sign.
    (r"(^|[=({:]|(?<![\w)}])\$)([\s$*({\\]*)-\s+", r"\1\2-"),
    (r"\\[a-z]+\s*\{?|[A-Z]{0,3}\$\s*|[{}\\€£¥₹]|\*\*(?![0-9])|(?<![0-9])\*\*", ""),
)
# 5 500 ml bottles are five, and 3 100-page books are three.
MEASURE = "(?:[ckm]?[glm]|oz|lb|inch|foot|mile|gallon|lit(?:er|re)|pound|ounce|gram|dollar|page)"
COUNT = rf"-|[ ]{MEASURE}[ ](?!less|plus|minus|across)[a-z]{{3,}}s\b"
THOUSANDS = (
    r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])"
    rf"|[0-9]{{1,3}}(?:[ ][0-9]{{3}})+(?![0-9]|{COUNT})"
)
WHOLE = rf"(?:{THOUSANDS}|[0-9]+)"
NUMBER = rf"""
    (?: (?<![\w)]) (?P<sign>[-+]) [(*~]* )?
    (?: (?: (?P<units>{WHOLE})\s+ )? (?P<fraction>{WHOLE}\s*/\s*(?!0){WHOLE}(?![.,]?[0-9]))
        | (?P<decimal>{WHOLE}(?:\.[0-9]+)? (?:e[-+]?[0-9]{{1,2}}(?![0-9]))? | (?<![.\w])\.[0-9]+) )
    (?: \s*(?P<scale>{"|".join(SCALES)})s?\b(?!-) )?
"""
TERM = re.sub(r"\?P<\w+>", "?:", NUMBER)
SIDE = rf"{TERM} (?: [\s()%]* (?:\*\*|[-+*/^x]) [\s()%]* {TERM} )*"
EQUATION = re.compile(rf"{SIDE} (?: [\s()%]* = [\s()%]* {SIDE} )*", re.VERBOSE | re.IGNORECASE)
# After an equation: the end of the sentence after a few words, or a comma after at most one.
WORD = r"(?:[^\W0-9]+[\s)*/]*)"
END = re.compile(rf"[\s)%*/]*{WORD}?(?:{WORD}{{0,5}}(?:$|[.;!?](?:\s|$))|,(?:\s|$))")

# Before another answer: "or", perhaps after a unit; "and" or "to"; or a comma, in a list.
JOINER = re.compile(
    r"[\s)%*]*(?P<unit>[^\W0-9]+)??[\s(,]*(?P<word>,|\bor\b|\band\b|\bto\b)[\s(]*"
    r"(?:(?:maybe|perhaps|possibly|even)\s+)?",
    re.IGNORECASE,
)
NEXT_OF_LIST = re.compile(r"[\s)%]*(?:[,.!?]|or\b|and\b|$)", re.IGNORECASE)


def first_number(line: str) -> Fraction | None:
    """The value of the first number or equation in a line; None if it has no value.

    >>> lines = ("so -$1,200.50 a day", "12 - 5 = 7.", "12 - 5", "10:30", "no")
    >>> [str(first_number(line)) for line in lines]
    ['-2401/2', '7', 'None', 'None', 'None']
    """
    line = re.sub(r"(?<=[0-9])\s*(?=[¼-¾⅐-⅞]|\\[dt]?frac)", " ", line[:LONGEST])  # 3½ is 3 1/2
    line = re.sub(r"[⁰¹²³⁴-⁹]+", r"^\g<0>", line)  # 3² is 3^2
    line = unicodedata.normalize("NFKC", line)  # full-width forms, kinds of spaces, ½
    for pattern, replacement in SPELLINGS:
        line = re.sub(pattern, replacement, line)
    equation = EQUATION.search(line)
    if equation is None or re.match("[.,:]?[0-9]", line[equation.end() :]):
        return None
    sides = equation[0].split("=")
    if len(sides) > 1 and not END.match(line, equation.end()):
        return None
    numbers = [re.fullmatch(NUMBER, side.strip("()% "), re.VERBOSE | re.I) for side in sides]
    values = [_value(number) for number in numbers if number]
    if not values or _has_other_answer(line, equation.end(), values[-1]):
        return None
    return values[-1]


def _has_other_answer(line: str, end: int, value: Fraction) -> bool:
    """Whether another value follows at `end`. 120 minutes or 2 hours are one answer."""
    joiner = JOINER.match(line, end)
    other = re.compile(NUMBER, re.VERBOSE | re.I).match(line, joiner.end()) if joiner else None
    if other is None or _value(other) == value:
        return False
    if joiner["word"] == ",":
        return not joiner["unit"] and bool(NEXT_OF_LIST.match(line, other.end()))
    if joiner["unit"]:
        unit = re.match(r"\s*([^\W0-9]*)", line[other.end() :])[1]
        return joiner["word"].lower() == "or" and unit in ("", joiner["unit"])
    return True


def _value(number: re.Match) -> Fraction:
    value = Fraction(re.sub("[, ]", "", number["fraction"] or number["decimal"]))
    if number["units"]:
        value += int(re.sub("[, ]", "", number["units"]))
    value *= SCALES.get((number["scale"] or "").lower(), 1)
    return -value if number["sign"] == "-" else value
