"""The one form that messages about wrong arguments have."""

from __future__ import annotations

from collections.abc import Mapping


def value_error(function: str, argument: str, got: object, accepted: str) -> ValueError:
    """A ValueError that names the function, the argument, what came and what is accepted."""
    return ValueError(f"{function}: {argument}: got {got}; accepted: {accepted}")


def type_error(function: str, argument: str, got: object, accepted: str) -> TypeError:
    """The same as a TypeError."""
    return TypeError(f"{function}: {argument}: got {got}; accepted: {accepted}")


def in_words_of(error: Exception, function: str, names: Mapping[str, str]) -> Exception:
    """An error of these forms about a call that a function made, as one of that function's.

    names: what it calls the other's arguments, where it is something else.
    """
    _, _, rest = str(error).partition(": ")
    argument, separator, problem = rest.partition(": ")
    message = f"{function}: {names.get(argument, argument)}{separator}{problem}"
    return TypeError(message) if isinstance(error, TypeError) else ValueError(message)
