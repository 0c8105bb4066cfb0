"""What a library says of itself: held against the headers, against Python's structs, and against the declarations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashxla import native
from flashxla.native import Spec
from flashxla.ops import OPS
from flashxla.ops.op import Aval, Op
from flashxla.records import LayoutMismatch, Records
from tests.native import driver
from tests.ops.test_errors import CALLS

ROOT = Path(__file__).parents[2]
HEADERS = ROOT / "csrc" / "include" / "flashxla"


def description(platform: str = "cpu") -> dict[str, Any]:
    """A copy of what a platform's library says."""
    return json.loads(native.library(platform)._cdll.flashxla_describe())


def structs(described: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Size and fields of every struct, by its name in C."""
    arguments = {f"{name}_args": record for name, record in described["operations"].items()}
    return {f"flashxla_{name}": record for name, record in (described["records"] | arguments).items()}


def members() -> list[tuple[str, str]]:
    return [(name, f["name"]) for name, record in structs(description()).items() for f in record["fields"]]


# --- Python's structs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("struct", "field"), members())
def test_another_offset_is_refused(struct: str, field: str) -> None:
    described = description()
    (member,) = (f for f in structs(described)[struct]["fields"] if f["name"] == field)
    member["offset"] += 8
    message = (
        rf"{struct}: offset of {field}: {member['offset']} in the library, {member['offset'] - 8} in this"
    )
    with pytest.raises(LayoutMismatch, match=message):
        Records(described)


@pytest.mark.parametrize("struct", structs(description()))
def test_another_size_is_refused(struct: str) -> None:
    described = description()
    structs(described)[struct]["size"] += 8
    with pytest.raises(LayoutMismatch, match=rf"{struct}: size: \d+ in the library, \d+ in this"):
        Records(described)


@pytest.mark.parametrize(("struct", "field"), [("flashxla_tensor", "rank"), ("flashxla_context", "needs")])
def test_a_member_that_is_left_out_is_refused(struct: str, field: str) -> None:
    """A library whose struct has a member that its description does not name."""
    described = description()
    record = structs(described)[struct]
    record["fields"] = [f for f in record["fields"] if f["name"] != field]
    with pytest.raises(LayoutMismatch, match=rf"{struct}: (offset|size)"):
        Records(described)


def test_arguments_are_filled_in_by_field() -> None:
    library = native.library("cpu")
    tensors = {"q": Spec("bfloat16", (3, 4, 8)), "k": Spec("uint8", (2, 2, 8), (32, 8, 2))}
    args: Any = library.arguments("attention", tensors, {"kv_dtype": "float8_e5m2", "softcap": 0.5})
    codes = library.records.dtypes
    assert (args.q.dtype, args.q.rank, args.q.shape[:3], args.q.stride[:3]) == (
        codes["bfloat16"],
        3,
        [3, 4, 8],
        [32, 8, 1],
    )
    assert (args.k.dtype, args.k.stride[:3]) == (codes["uint8"], [32, 8, 2])
    assert (args.kv_dtype, args.softcap, args.causal) == (codes["float8_e5m2"], 0.5, 0)
    assert args.q.data == native.SOME_ADDRESS and not args.v.data


MAKE = {
    "kv_cache": driver.kv_cache_call,
    "attention": driver.attention_call,
    "merge_states": driver.merge_states_call,
}


@pytest.mark.parametrize("context", ["needs", "prepare"])
@pytest.mark.parametrize("operation", MAKE)
def test_nothing_runs(rng: np.random.Generator, operation: str, context: str) -> None:
    """Neither where a call is asked what it needs, nor where its plan is made, which the CPU's kernels have none of."""
    library = native.library("cpu")
    for _ in range(5):
        call = MAKE[operation](rng)
        arrays = {name: np.array(array, order="C") for name, array in call.tensors.items()}
        before = {name: array.tobytes() for name, array in arrays.items()}
        specs = {name: Spec(array.dtype.name, array.shape) for name, array in arrays.items()}
        args = library.arguments(operation, specs, call.scalars)
        for name, array in arrays.items():
            getattr(args, name).data = array.ctypes.data
        if context == "needs":
            assert library.needs(operation, args).kernels
        else:
            assert library.run(operation, args, prepare=1) is None
        assert {name: array.tobytes() for name, array in arrays.items()} == before


# --- the headers ----------------------------------------------------------------------------------------------------


def macro(header: str, name: str) -> str:
    """The lines of a macro, without its comments."""
    text = re.sub(r"/\*.*?\*/", "", (HEADERS / header).read_text(), flags=re.DOTALL)
    found = re.search(rf"^#define {name}\(\w\)((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    assert found, name
    return found[1]


def entries(header: str, name: str) -> list[list[str]]:
    """The arguments of each entry of an X macro."""
    return [re.split(r",\s*", entry) for entry in re.findall(r"\b[A-Z]\(([^)]*)\)", macro(header, name))]


def declared_operations() -> list[str]:
    return [name for name, _ in entries("operations.h", "FLASHXLA_OPERATIONS")]


def test_the_library_has_the_operations_of_the_headers() -> None:
    assert list(description()["operations"]) == declared_operations()
    assert {path.stem for path in HEADERS.glob("*.h")} == {
        *declared_operations(),
        "common",
        "operation",
        "operations",
    }


@pytest.mark.parametrize("operation", declared_operations())
def test_fields_are_those_of_the_header(operation: str) -> None:
    """Names, kinds and uses by the plan, in order."""
    declared = entries(f"{operation}.h", f"FLASHXLA_{operation.upper()}_FIELDS")
    described = [[f["kind"], f["name"], f["plan"]] for f in description()["operations"][operation]["fields"]]
    assert described == [[kind.lower(), name, plan.lower()] for kind, name, plan in declared]


@pytest.mark.parametrize("table", ["dtypes", "layouts"])
def test_codes_are_those_of_the_header(table: str) -> None:
    declared = entries("common.h", f"FLASHXLA_{table.upper()}")
    assert description()[table] == {name: int(value) for _, name, value in declared}


@pytest.mark.parametrize("record", ["tensor", "kernel", "needs", "context"])
def test_members_are_those_of_the_header(record: str) -> None:
    text = re.sub(r"//.*", "", (HEADERS / "common.h").read_text())
    body = re.search(rf"typedef struct flashxla_{record} {{(.*?)}}", text, flags=re.DOTALL)
    assert body
    declared = [re.search(r"(\w+)(\[\w+\])?$", member.strip())[1] for member in body[1].split(";")[:-1]]  # type: ignore[index]
    assert [f["name"] for f in description()["records"][record]["fields"]] == declared


# --- the declarations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_declared_tensors_are_fields(op: Op) -> None:
    operation = native.library("cpu").operation(op.native)
    assert [operation.fields[t.field].kind for t in op.tensors] == ["input"] * len(op.tensors)
    assert {r.field for r in op.results} == set(operation.of_kind("result"))
    fields = [t.field for t in op.tensors]
    assert len(set(fields)) == len(fields)


KINDS = {int: ("integer",), float: ("real",), str: ("layout", "dtype")}


@pytest.mark.parametrize("call", CALLS)
def test_resolved_scalars_are_fields(call: str) -> None:
    """A call gives every scalar of its operation, each of the field's kind."""
    function, arguments = CALLS[call]
    (op,) = (op for op in OPS if op.public and op.function == function)
    assert op.public is not None
    values = dict(zip(op.names, op.public(**arguments), strict=True))
    avals = {
        name: Aval(x.shape, x.dtype.name) if isinstance(x, np.ndarray) else None for name, x in values.items()
    }
    resolved = op.resolve(
        {t.name: avals[t.name] for t in op.tensors}, {s.name: values[s.name] for s in op.scalars}
    )
    library = native.library("cpu")
    fields = library.operation(op.native).fields
    scalars = {field.name for field in fields.values() if not field.is_tensor}
    assert {name for name, _ in resolved.attributes} == scalars
    for name, value in resolved.attributes:
        assert fields[name].kind in KINDS[type(value)], name
        library.scalar(op.native, name, value)


def test_dtypes_and_layouts_of_the_declarations_have_codes() -> None:
    from flashxla.ops.cache_format import ONE_TENSOR_DIMS, PAIR_DIMS

    records = native.library("cpu").records
    assert set(records.layouts) == {*PAIR_DIMS, *ONE_TENSOR_DIMS}
    assert {dtype for op in OPS for t in op.tensors for dtype in t.dtypes} <= set(records.dtypes)


# --- libraries ------------------------------------------------------------------------------------------------------


def test_both_platforms_describe_the_same() -> None:
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    both = {platform: description(platform) for platform in ("cpu", "cuda")}
    assert [both[platform].pop("platform") for platform in both] == ["cpu", "cuda"]
    assert both["cpu"] == both["cuda"]


# A library of before flashxla_describe, and one of before anything.
OLDER = {
    "without flashxla_describe": """
        const char* flashxla_last_error(void) { return ""; }
        long flashxla_check_indices(void) { return 0; }
        const char* flashxla_ffi_target_name(long i) { return 0; }
        void* flashxla_ffi_target_handler(long i) { return 0; }
        const char* flashxla_ffi_register(const void* api, const char* platform) { return 0; }
        long flashxla_ffi_api_version(void) { return 1; }
        long flashxla_ffi_runtime_api_version(const void* api) { return 1; }
    """,
    "without any function": "int flashxla_nothing;",
}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("older", OLDER)
def test_an_older_library_is_named(older: str, tmp_path: Path) -> None:
    source = tmp_path / "older.c"
    source.write_text(OLDER[older])
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libflashxla_cpu.so", source], check=True)
    code = (
        "from flashxla import native\ntry: native.library('cpu')\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FLASHXLA_LIBRARY_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    message = "flashxla: libflashxla_cpu.so is of an older version of flashxla; build it with 'make build'"
    assert done.stdout.strip() == message, done.stderr
