"""flashxla doctor with vLLM: a live generation, and what is broken is reported."""

import dataclasses
import sys

import pytest
from flashxla_vllm import doctor, versions

# The cache is read after it was written, as it was before: XLA must keep a copy.
BROKEN = """
import runpy
from flashxla_vllm import attention

write = attention.attend

def attend(mask, kv_cache, *rest):
    new, out = write(mask, kv_cache, *rest)
    return new, out + 0 * kv_cache.sum()

attention.attend = attend
runpy.run_module("flashxla_vllm.doctor", run_name="__main__")
"""


def test_report():
    rows = list(doctor.findings())
    assert [row[0] for row in rows] == [*versions.SUPPORTED, "vllm platform", "in place: vllm"]
    assert all(ok for _, ok, _ in rows), rows
    text = rows[-1][2]
    count = len(doctor.PROMPTS) * doctor.NEW_TOKENS
    assert f"{count} tokens, {count} of them transformers'; the pointers stayed: " in text
    assert "; 0 copies of a cache (4096 KiB) in 4 compiled programs; " in text
    assert "temporary memory 0 KiB" not in text


def test_a_copy_is_found():
    result = doctor.generate([sys.executable, "-c", BROKEN])
    assert not result.ok
    assert result.right == result.tokens
    assert len(result.cache_copies) >= doctor.LAYERS
    assert result.cache_copies[0] in result.text()


def test_pointers_that_change_and_wrong_tokens_are_failures():
    count = len(doctor.PROMPTS) * doctor.NEW_TOKENS
    fine = doctor.Generation("cpu:0", count, count, 9, 2, True, doctor.CACHE_BYTES, [], 0, 3)
    assert fine.ok
    for change in ({"pointers_stay": False}, {"right": count - 1}, {"tokens": count - 1}, {"programs": 0}):
        assert not dataclasses.replace(fine, **change).ok
    assert "THE POINTERS CHANGED" in dataclasses.replace(fine, pointers_stay=False).text()


def test_another_version_is_named_and_ends_the_report(monkeypatch):
    monkeypatch.setitem(versions.SUPPORTED, "vllm", "0.34.0")
    rows = list(doctor.findings())
    assert rows[0] == ("vllm", False, "0.33.0; flashxla-vllm knows 0.34.0")
    assert [row[0] for row in rows] == [*versions.SUPPORTED]
    monkeypatch.setenv(versions.ANY_VERSION, "1")
    _, ok, text = next(doctor.findings())
    assert ok is None and versions.ANY_VERSION in text


def test_a_platform_that_was_not_chosen(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    _, ok, text = doctor._platform()
    assert ok is False
    assert doctor.PLATFORM in text


def test_a_probe_that_crashes_or_hangs():
    with pytest.raises(RuntimeError, match=r"exit status 3:[\s\S]*it broke"):
        doctor.generate([sys.executable, "-c", "import sys; print('it broke', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(RuntimeError, match=r"no answer within 0\.5 s"):
        doctor.generate([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)
