"""The one form that messages about wrong arguments have."""

from __future__ import annotations


def value_error(function: str, argument: str, got: object, accepted: str) -> ValueError:
    """A ValueError that names the function, the argument, what came and what is accepted."""
    return ValueError(f"{function}: {argument}: got {got}; accepted: {accepted}")


def type_error(function: str, argument: str, got: object, accepted: str) -> TypeError:
    """The same as a TypeError."""
    return TypeError(f"{function}: {argument}: got {got}; accepted: {accepted}")
