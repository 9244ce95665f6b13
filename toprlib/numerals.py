r"""Reads numbers in plain text and LaTeX: `-$1,200`, `9 500`, `3 1/2`, `\frac12`, `½`, `2 million`.

A hyphen after a letter or digit is no sign. Currency, units, percent and bold print are ignored.
`1,2`, `10:30` and `10-15` have no value, nor has `5 or 6`: a model would learn to hedge.
"""

import re
import unicodedata
from fractions import Fraction

LONGEST = 1_000  # characters that are read, so that no pattern takes long
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
CHARACTERS = str.maketrans("\u2010\u2012\u2013\u2212\u2044×·÷≈~", "----/***= ")  # \u2044 is in ½
# 1,200,000 or 12,00,000 or 9 500; but 5 500 ml bottles are five, and 3 100-page books are three.
THOUSANDS = (
    r"(?<![0-9.])[0-9]{1,3}(?:(?:[,'_][0-9]{2,3})*[,'_][0-9]{3}(?![0-9])"
    r"|(?: [0-9]{3})+(?![0-9-]| (?:[ckm]?[glm]|oz|inch|foot|pound|dollar|page) [a-z]+[^su]s\b))"
)
SPELLINGS = (  # pattern -> what replaces it, in this order
    (r"(?<=[0-9])[kK]\b", " thousand"),
    (r"(?<=[0-9])M\b", " million"),
    (r"\\[,;: ]", " "),  # spaces of LaTeX
    (r"\\[dt]?frac\s*(\{[^{}]*\}|[0-9])\s*(\{[^{}]*\}|[0-9])", r"\1/\2"),
    (r"\\(?:times|cdot|div)|\btimes\b", "*"),
    (r"\\approx", "="),
    (r"\b(?:minus|negative)\s+", "-"),
    (r"((?:^|[=(:{$])[\s*]*)-\s+", r"\1-"),  # "- 3" is negative, but not in "so - 3"
    (r"\\[a-z!]+|[A-Z]{0,3}\$\s*|[{}\\€£¥₹]|\*\*", ""),  # LaTeX, currency, bold print
    (THOUSANDS, lambda number: re.sub("[ ,'_]", "", number[0])),
    (r"\s*/\s*", "/"),  # 1 / 2
    (r"\b([a-z]+)\W+or [0-9./]+ (?!\1)[a-z]+", r"\1"),  # 120 minutes or 2 hours are one answer
    (r"([0-9].*?)[.;!?]\s+(?![-+*/=a-z]).*", r"\1"),  # sentences after the first one with a number
)
NUMBER = re.compile(
    rf"""(?xi) (?: (?<![\w)]) (?P<sign>[-+]) \(* )?
    (?P<number> (?:[0-9]+\s+)? [0-9]+/(?!0)[0-9]+  # 3 1/2
      | [0-9]+ (?:\.[0-9]+)? (?:e[-+]?[0-9]{{1,2}}(?![0-9]))? | (?<![.\w])\.[0-9]+ )
    (?: \s*(?P<scale>{"|".join(SCALES)})s?\b(?!-) )?"""  # 3 million-dollar houses are three
)
# A number before an operator or in a list is no answer.
OPERATOR = re.compile(r"(?i)[\s)%]*(?:[-+*/^x,:.]|and\b|to\b)\W*[0-9]")
# Values around these words must be equal: 3 or 4; 10 because x = 2.
OTHER = re.compile(r"(?i)\b(?:or|maybe)\b|(?:[.,;!?(]\s*(?=[a-z])|\b(?:because|since|so|and)\b).*=")


def first_number(line: str) -> Fraction | None:
    """The value of the first number or equation in a line; None if it has no value.

    >>> lines = ("so -$1,200.50 a day", "12 - 5 = 7.", "12 - 5", "10:30", "no")
    >>> [str(first_number(line)) for line in lines]
    ['-2401/2', '7', 'None', 'None', 'None']
    """
    line = re.sub(r"(?<=[0-9])\s*(?=[¼-¾⅐-⅞]|\\[dt]?frac)", " ", line[:LONGEST])  # 3½ is 3 1/2
    line = re.sub(r"(?<=[0-9])(?:\*\*(?=[0-9])|(?=[⁰¹²³⁴-⁹]))", "^", line)  # 3², 3**2: no answers
    line = unicodedata.normalize("NFKC", line).translate(CHARACTERS)
    for pattern, replacement in SPELLINGS:
        line = re.sub(pattern, replacement, line)
    values = {_read(part) for part in OTHER.split(line) if re.search("[0-9]", part)}
    return values.pop() if len(values) == 1 else None


def _read(equation: str) -> Fraction | None:
    """The first number after the last "=", or before it if an expression is after it."""
    for side in reversed(equation.split("=")):
        number = NUMBER.search(side)
        if number and not OPERATOR.match(side, number.end()):
            value = sum(Fraction(term) for term in number["number"].split())
            value *= SCALES.get((number["scale"] or "").lower(), 1)
            return -value if number["sign"] == "-" else value
    return None
