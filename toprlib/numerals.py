r"""Reads numbers in plain text and LaTeX.

| form | written as |
|---|---|
| sign | `-3`, `- 3`, `-$3`, `$-3$`, `minus 3`, `negative 3`; U+2010 to U+2013, U+2212 |
| thousands | `9,500`, `9 500`, `9{,}500`, `9,\!500`, `9\,500`; also in groups of two: `1,00,000` |
| decimal | `2.50`, `.5`, `1.5e3`, `1.5 million` |
| fraction | `1/2`, `3 1/2`, `\frac{1}{2}`, `3\dfrac12`, `½` |
| equation | `10 - 5 = 5 eggs`: the last side that is one number; must end a sentence or line |
| digits | 0 to 9, also the full-width and mathematical characters for them |

A hyphen after a letter or digit is no sign, nor is the dash of "so - 3". Currency, units, percent
and bold print are ignored. What is not one number has no value: `1,2`, `10:30`, `10-15`,
`2 + 3`, `2 * 3 = 6 in the first step`.
"""

import re
import unicodedata
from decimal import Decimal, localcontext

LONGEST = 100  # characters of a number; ours
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
SCALES |= {"trillion": 10**12}
EQUALS = {"=", "≈", "approx"}
OPERATORS = {*"+-–*/^x×·÷", "**", "times", "cdot", "div"}

# Pattern -> what replaces it, in this order.
NUMBER_FOLLOWS = r"(?=(?>(?:\\[a-z]++|[\\$€£¥₹\s*({])*)[0-9.])"
CHARACTERS = (
    (r"(?<=[0-9])(?=[¼-¾⅐-⅞])", " "),  # 3½ is 3 1/2
    (r"([⁰¹²³⁴-⁹]+)", r"^\1"),  # 3² is 3^2
    (r"[\u2010-\u2012\u2212]", "-"),
    (rf"\u2013{NUMBER_FOLLOWS}", "-"),
)
WORDS = (
    (r"\u2044", "/"),
    (r"(?<=[0-9])\s*(?=\\[dt]?frac)", " "),  # 3\frac{1}{2} is 3 1/2
    (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
    (r"\\[dt]?frac\s*([0-9])\s*([0-9])", r"\1/\2"),
    (r"(?<=[0-9])(?:,\\!|\{,\}|\\[,;: ]|~)(?=[0-9])", ","),
    (rf"\b(?:minus|negative)\s++{NUMBER_FOLLOWS}", "-"),
    # At the start, or after an opening sign; elsewhere "- 3" has a dash.
    (rf"(^|[=({{:]|(?<![0-9])\$)([\s$*({{\\]*)-\s++{NUMBER_FOLLOWS}", r"\1\2-"),
)

# Repetitions are possessive, so that a megabyte of digits takes linear time: x++ of a character,
# (?>(?:xy)+) of a group. Python before 3.11.5 matches (?:xy)++ wrongly.
WHOLE = r"""(?:
    [0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9]) | [0-9]{1,3}(?>(?:\ [0-9]{3})+)(?![0-9]) | [0-9]++
)"""
NUMBER = re.compile(
    rf"""
    (?:
        (?<![\w)}}]) (?P<sign>[-+])
        [A-Z]{{0,3}}  # -US$ 3, -\mathbf{{3}}, {{-}}3
        (?: (?: \\[a-z]++\s*+\{{?+ | \\[$(),;!\ ] | [$€£¥₹(){{}}*~] ) \s*+ )*
    )?
    (?:
        (?: (?P<units>{WHOLE})\s+ )? (?P<numerator>{WHOLE})\s*/\s*(?P<denominator>{WHOLE})
        | (?P<decimal> {WHOLE}(?:\.[0-9]++)? | (?<![.\w])\.[0-9]++ )
          (?P<exponent> e[-+]?[0-9]{{1,2}}(?![0-9]) )?
    )
    (?: (?:\\text\{{|[\s~\\])* (?P<scale>{"|".join(SCALES)})s?\b(?!-) )?
    """,
    re.VERBOSE | re.IGNORECASE,
)
REST_OF_ANOTHER = re.compile(r"[.,:]?[0-9]")  # right after a number, in 1,2 and 10:30
# Around an operator: LaTeX, bold print, currency. A lone ** is a power.
DECORATION = re.compile(r"\\[a-z]++\s*+\{|\*\*(?=.)|(?<=.)\*\*|[\s$€£¥₹%(){}\\]")
END_OF_EQUATION = re.compile(
    r"(?>(?:\\[a-z]++\{|[\s$€£¥₹%(){}*\\])*)(?:[^\W0-9]++[\s$){}*\\]*+)?(?:$|[.,;!?](?:\s|$))"
)


def normalize(text: str) -> str:
    r"""The text with its numbers in plain characters, in place of those of LaTeX and Unicode.

    >>> normalize("−１\u2009½ or 9{,}500 or \\frac{1}{2}")
    '-1 1/2 or 9,500 or 1/2'
    """
    for pattern, replacement in CHARACTERS:
        text = re.sub(pattern, replacement, text)
    text = unicodedata.normalize("NFKC", text)  # full-width forms, kinds of spaces, ½
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    return text


def first_number(line: str) -> Decimal | None:
    """The value of the first number or equation in a normalized line; None if it has no value.

    >>> [first_number(line) for line in ("so -$1,200.50 a day", "12 - 5 = 7.", "12 - 5", "no")]
    [Decimal('-1200.50'), Decimal('7'), None, None]
    """
    numbers = NUMBER.finditer(line)
    last = next(numbers, None)
    if last is None:
        return None
    sides = [[last]]
    for number in numbers:
        between = line[last.end() : number.start()]
        operator = DECORATION.sub("", between) or number["sign"]
        if operator in EQUALS:
            sides.append([number])
        elif operator in OPERATORS:
            sides[-1].append(number)
        else:
            break
        last = number
    results = [side[0] for side in sides if len(side) == 1]
    is_equation = len(sides) > 1
    if not results or REST_OF_ANOTHER.match(line, last.end()):
        return None
    if is_equation and not END_OF_EQUATION.match(line, last.end()):
        return None
    return _value(results[-1])


def read_number(text: str) -> Decimal | None:
    """The value of a text that is one number, and nothing else; None for any other text.

    >>> read_number("-1,080"), read_number("5 apples")
    (Decimal('-1080'), None)
    """
    number = NUMBER.fullmatch(normalize(text.strip()).lstrip("$"))
    return _value(number) if number else None


def _value(number: re.Match) -> Decimal | None:
    if len(number[0]) > LONGEST:
        return None
    parts = {}
    for name in ("units", "numerator", "denominator", "decimal"):
        parts[name] = Decimal(re.sub("[, ]", "", number[name] or "0"))
    with localcontext(prec=2 * LONGEST):  # only fractions are rounded
        if number["decimal"]:
            value = parts["decimal"].scaleb(int((number["exponent"] or "e0")[1:]))
        elif parts["denominator"] == 0:
            return None
        else:  # rounded once, so that equal fractions are equal
            numerator = parts["units"] * parts["denominator"] + parts["numerator"]
            value = numerator / parts["denominator"]
        value *= SCALES.get((number["scale"] or "").lower(), 1)
        return -value if number["sign"] == "-" else value
