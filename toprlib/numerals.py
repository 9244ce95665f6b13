r"""Reads numbers in plain text and LaTeX: `-$1,200`, `9 500`, `3 1/2`, `\frac12`, `½`, `2 million`.

A hyphen after a letter or digit is no sign, nor is the dash of "so - 3". Currency, units, percent
and bold print are ignored. `1,2`, `10:30`, `10-15` and `2 * 3 = 6 in step 1` have no value.
"""

import re
import unicodedata
from fractions import Fraction

LONGEST = 1_000  # characters that are read, so that no pattern takes long; ours
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
SCALES |= {"trillion": 10**12}

SPELLINGS = (  # pattern -> what replaces it, in this order
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
THOUSANDS = r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]{1,3}(?:[ ][0-9]{3})+(?![0-9-])"
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
# After an equation: the end of the line or sentence, after at most one word.
END = re.compile(r"[\s)%*]*(?:[^\W0-9]+[\s)*]*)?(?:$|[.,;!?](?:\s|$))")


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
    return values[-1] if values else None


def _value(number: re.Match) -> Fraction:
    value = Fraction(re.sub("[, ]", "", number["fraction"] or number["decimal"]))
    if number["units"]:
        value += int(re.sub("[, ]", "", number["units"]))
    value *= SCALES.get((number["scale"] or "").lower(), 1)
    return -value if number["sign"] == "-" else value
