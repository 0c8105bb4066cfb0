"""The one form that messages about wrong arguments have."""

from __future__ import annotations

import re
from collections.abc import Mapping

# "function: argument: got X; accepted: Y"; of an entry of an index tensor "function: argument[3] = 9: outside [0, 8)".
_OURS = re.compile(r"\w+: (?P<argument>\w+)(?P<got>[:[ ].*?)(?P<accepted>; accepted: .*)?", re.DOTALL)
_OTHER = re.compile(r"\b(by|of) (\w+)")


def value_error(function: str, argument: str, got: object, accepted: str) -> ValueError:
    """A ValueError that names the function, the argument, what came and what is accepted."""
    return ValueError(f"{function}: {argument}: got {got}; accepted: {accepted}")


def type_error(function: str, argument: str, got: object, accepted: str) -> TypeError:
    """The same as a TypeError."""
    return TypeError(f"{function}: {argument}: got {got}; accepted: {accepted}")


def is_about(error: Exception, function: str) -> bool:
    """Whether an error is one of these forms about a call of a function, and not Python's or a framework's own."""
    return str(error).startswith(f"{function}: ")


def in_words_of(error: Exception, function: str, names: Mapping[str, str]) -> Exception:
    """An error of these forms about a call that a function made, as one of that function's.

    names: what it calls the other's arguments, where it is something else.
    """
    message = f"{error}"
    if ours := _OURS.fullmatch(message):
        # Sizes and dtypes that are accepted are those of another argument: "by key", "the dtype of key".
        accepted = _OTHER.sub(lambda m: f"{m[1]} {names.get(m[2], m[2])}", ours["accepted"] or "")
        message = f"{names.get(ours['argument'], ours['argument'])}{ours['got']}{accepted}"
    message = f"{function}: {message}"
    return TypeError(message) if isinstance(error, TypeError) else ValueError(message)
