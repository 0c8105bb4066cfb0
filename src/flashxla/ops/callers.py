"""In whose name messages about gradients speak, where a function makes calls of others.

Errors about arguments come while the function runs, which puts them into its words (messages.in_words_of). A missing
gradient is noticed later, so what will say so is told the name when the call is made.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_OF_KV = {"k": "kv", "v": "kv"}
_OF_QKV = {"q": "qkv", "k": "qkv", "v": "qkv"}
# What functions call the arguments of those that they call, where it is something else.
_NAMES: dict[str, Mapping[str, str]] = {
    "flash_attn_kvpacked_func": _OF_KV,
    "flash_attn_qkvpacked_func": _OF_QKV,
    "flash_attn_varlen_kvpacked_func": _OF_KV,
    "flash_attn_varlen_qkvpacked_func": _OF_QKV,
    "merge_all_attn_states": {"out_a": "outs", "out_b": "outs", "lse_a": "lses", "lse_b": "lses"},
}


@dataclasses.dataclass(frozen=True)
class Caller:
    """A function that makes calls of others. names: what it calls their arguments, where it is something else."""

    function: str
    names: Mapping[str, str]


_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("caller", default=None)


def caller() -> Caller | None:
    """The function that makes the calls that are made now, if it is not the users themselves."""
    return _caller.get()


@contextlib.contextmanager
def called_by(function: Caller | None) -> Iterator[None]:
    """In the block calls are made by this function."""
    token = _caller.set(function)
    try:
        yield
    finally:
        _caller.reset(token)


def in_its_name(function: Callable[..., Any], is_off: Callable[[], bool]) -> Callable[..., Any]:
    """A function in whose name messages about gradients of its calls speak. is_off: whether they do not at the time."""
    name = function.__name__
    called = Caller(name, _NAMES.get(name, {}))

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        if is_off():
            return function(*args, **kwargs)
        with called_by(called):
            return function(*args, **kwargs)

    return named


def in_caller_words(names: Sequence[str]) -> str:
    """A list of arguments, as the function that users called calls them."""
    now = _caller.get()
    return ", ".join(dict.fromkeys(now.names.get(name, name) if now else name for name in names))
