"""What a YAML scalar without quotes is, as kubectl's YAML library (not PyYAML) decides it.

YAML 1.1 without its sexagesimal numbers and its times; octal as 017 and 0o17; and as in JSON, 3.0 is 3.
"""

from __future__ import annotations

import math
import re
from typing import Final

_TRUE: Final = {"y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"}
_FALSE: Final = {"n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"}
_NULL: Final = {"", "~", "null", "Null", "NULL"}
_NOT_FINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TIMESTAMP: Final = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?")
_INTEGER: Final = re.compile(
    r"(?P<sign>[-+]?)(?:0[xX](?P<x>[0-9A-Fa-f]+)|0[bB](?P<b>[01]+)|0[oO]?(?P<o>[0-7]+)|(?P<d>0|[1-9][0-9]*))"
)
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
Scalar = str | int | float | bool | None

_MOST_DIGITS: Final = 100
"""Of an integer that is worth a look: 64 bits have 64."""
_BASES: Final = {"x": 16, "b": 2, "o": 8, "d": 10}


def resolved(text: str) -> Scalar:
    """What a scalar without quotes is: a text, a number, a truth value or None; not a number for what JSON has not."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _NOT_FINITE.fullmatch(text):
        return math.nan
    if _TIMESTAMP.fullmatch(text):
        return text
    return _number(text)


def _number(text: str) -> int | float | str:
    """A number, or the text where it is none."""
    digits = text if text.startswith(".") else text.replace("_", "")
    if text[0] not in "+-.0123456789":
        return text
    if len(digits) <= _MOST_DIGITS and (match := _INTEGER.fullmatch(digits)):
        base = next(name for name in _BASES if match[name])
        number = int(match["sign"] + match[base], _BASES[base])
        if -(2**63) <= number < 2**63:
            return number
    if _FLOAT.fullmatch(digits):
        real = float(digits)
        if math.isinf(real):
            return text
        # JSON has one kind of number: 3.0 is 3.
        return int(real) if real.is_integer() and abs(real) < 2**63 else real
    return text
