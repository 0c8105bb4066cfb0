"""Hold csrc/pjrt/pjrt_abi.h against the PJRT C API's own definitions, version by version.

When JAX has a new CUDA plugin: find a TensorFlow whose pjrt_c_api.h has the plugin's version of the API (`flashxla
doctor` says which that is; nightly wheels have nearly every one) and run

    python scripts/pjrt_structs.py --tensorflow tensorflow-cpu==2.20.0 tf-nightly==2.23.0.dev20261026 ...

or give paths of pjrt_c_api.h in place of wheels, of which only that header is read. The first version should be the
caller's: 0.72 (tensorflow-cpu 2.20), which PyTorch/XLA 2.9 is made with. For each version it says which of the structs
and functions that the caller can know are different from the version before. Then pjrt_abi.h must have the layout of
the newest version, and all that grew since the first must be among its structs that grow (GROWN below); the exit
status is 1 if not. What is printed as GREW goes there and through csrc/pjrt/grown_structs.h; with nothing printed
kNewestMinor can be raised.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path

ABI = Path(__file__).parents[1] / "csrc/pjrt/pjrt_abi.h"
# What csrc/pjrt passes on at full length.
GROWN = {
    "PJRT_ExecuteOptions",
    "PJRT_Device_MemoryStats_Args",
    "PJRT_Executable_DeserializeAndLoad_Args",
    "PJRT_Executable_GetCompiledMemoryStats_Args",
}
IN_WHEEL = "xla/pjrt/c/pjrt_c_api.h"
FFI = "pjrt_c_api_ffi_extension.h"
COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Version:
    """What one header defines."""

    name: str
    folder: Path  # holds the header, and that of the FFI extension if there is one, at IN_WHEEL
    minor: int
    structs: dict[str, int]  # sizes without padding at the end; the FFI extension's are not for callers
    functions: dict[str, int]  # places in the table


class RemoteFile(io.RawIOBase):
    """A file on a server, of which only what is read is fetched."""

    def __init__(self, url: str) -> None:
        self._url, self._position = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        """As io.RawIOBase."""
        return True

    def seekable(self) -> bool:
        """As io.RawIOBase."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As io.RawIOBase."""
        self._position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        )
        return self._position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        """As io.RawIOBase."""
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        wanted = {"Range": f"bytes={self._position}-{end - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self._url, headers=wanted)) as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def headers_of_wheel(requirement: str) -> dict[str, str]:
    """The API's headers in a TensorFlow wheel on PyPI, by file name."""
    project, version = requirement.split("==")
    index = f"https://pypi.org/simple/{project}/"
    with urllib.request.urlopen(index) as answer:
        links = re.findall(r'<a href="([^"#]+)[^>]*>([^<]+)</a>', answer.read().decode())
    files = [
        link
        for link, name in links
        if re.search(rf"-{re.escape(version)}-cp\w+-cp\w+-manylinux.*x86_64\.whl$", name)
    ]
    if not files:
        raise SystemExit(f"{requirement}: no wheel for Linux on x86_64 on PyPI")
    remote = io.BufferedReader(RemoteFile(urllib.parse.urljoin(index, files[-1])), 1 << 20)  # type: ignore[type-var]
    with zipfile.ZipFile(remote) as wheel:
        names = [name for name in wheel.namelist() if name.endswith((IN_WHEEL, f"xla/pjrt/c/{FFI}"))]
        return {Path(name).name: wheel.read(name).decode() for name in names}


def headers_of_path(path: Path) -> dict[str, str]:
    """A header, and that of the FFI extension if it lies beside it (under the same prefix)."""
    ffi = path.with_name(path.name.replace("pjrt_c_api.h", FFI))
    texts = {"pjrt_c_api.h": path.read_text()}
    return texts | ({FFI: ffi.read_text()} if ffi.is_file() else {})


def run(source: str, folder: Path, *flags: str) -> str:
    """What a C++ program prints."""
    program = folder / "program"
    command = ["c++", "-std=c++17", f"-I{folder}", *flags, "-x", "c++", "-", "-o", str(program)]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return subprocess.check_output([program], text=True)


def read_version(name: str, texts: dict[str, str], folder: Path) -> Version:
    """Compile a version's headers."""
    target = folder / IN_WHEEL
    target.parent.mkdir(parents=True)
    for file, text in texts.items():
        target.with_name(file).write_text(text)
    api = COMMENTS.sub("", texts["pjrt_c_api.h"])
    # Since 0.114 arguments of macros may be on lines of their own.
    structs = set(re.findall(r"PJRT_DEFINE_STRUCT_TRAITS\(\s*(PJRT_\w+)\s*,", api))
    functions = re.findall(r"_PJRT_API_STRUCT_FIELD\(\s*(PJRT_\w+)\s*\)", api)
    lines = [f'std::printf("S {s} %zu\\n", (size_t){s}_STRUCT_SIZE);' for s in sorted(structs)]
    first = "offsetof(PJRT_Api, pjrt_api_version) + sizeof(PJRT_Api_Version)"
    lines += [
        f'std::printf("F {f} %zu\\n", (offsetof(PJRT_Api, {f}) - ({first})) / sizeof(void*));'
        for f in functions
    ]
    lines += ['std::printf("V minor %d\\n", PJRT_API_MINOR);']
    output = run(f"{includes(texts)}\nint main() {{ {' '.join(lines)} }}", folder)
    found: dict[str, dict[str, int]] = {"S": {}, "F": {}, "V": {}}
    for line in output.splitlines():
        kind, what, number = line.split()
        found[kind][what] = int(number)
    return Version(name, folder, found["V"]["minor"], found["S"], found["F"])


def includes(files: Iterable[str]) -> str:
    """The preamble of a program that uses headers of the API."""
    return "\n".join(
        ["#include <cstddef>", "#include <cstdio>", *(f'#include "xla/pjrt/c/{f}"' for f in files)]
    )


def differences(before: Version, after: Version, known: Version) -> list[str]:
    """What is different of that which the caller can know."""
    found = []
    for kind, word in (("structs", "GREW"), ("functions", "MOVED")):
        old, new = getattr(before, kind), getattr(after, kind)
        for name in getattr(known, kind):
            if old.get(name) != new.get(name):
                found.append(f"{word if name in new else 'GONE'} {name}: {old.get(name)} -> {new.get(name)}")
    return found


def plain(name: str) -> str:
    """A name of the API or of pjrt_abi.h, such that they are equal."""
    name = {"PJRT_Extension_Base": "Extension", "PJRT_Api": "-"}.get(name, name)
    return name.removeprefix("PJRT_").replace("_", "").lower()


def fields(body: str) -> set[str]:
    """The names of a struct's members, but for those of a type that it defines itself."""
    for nested in re.findall(r"struct (\w+) \{", body):
        body = re.sub(rf"struct {nested} \{{[^}}]*\}};|\b{nested} [^;]*;", "", body)
    return {
        name or function
        for function, name in re.findall(r"(?:\(\*(\w+)\)\([^;]*|\b(\w+)(?:\[\d+\])?);", body)
    }


def bodies(text: str) -> dict[str, str]:
    """The structs that a header defines."""
    return dict(re.findall(r"^(?:typedef )?struct (\w+) \{\n(.*?)^\}", COMMENTS.sub("", text), re.M | re.S))


def mismatches(version: Version) -> tuple[list[str], int]:
    """Where pjrt_abi.h has not the layout of a version, and how much of it was compared."""
    abi = ABI.read_text()
    folder = version.folder / Path(IN_WHEEL).parent
    files = sorted(path.name for path in folder.iterdir())
    theirs = {
        plain(name): (name, body) for f in files for name, body in bodies((folder / f).read_text()).items()
    }
    places = {plain(name): place for name, place in version.functions.items()}
    problems, compared, checks = [], 0, []
    (indices,) = re.findall(r"^enum FunctionIndex .*?^\}", abi, re.M | re.S)
    for name, place in re.findall(r"^  k(\w+) = (\d+),", indices, re.M):
        compared += 1
        if places.get(plain(name)) != int(place):
            problems.append(f"function {name}: at {place}, in the API at {places.get(plain(name))}")
    for name, body in bodies(abi).items():
        if plain(name) not in theirs:
            if name != "Api":  # whose functions it leaves out
                problems.append(f"struct {name}: not in the headers given ({', '.join(files)})")
            continue
        api, api_body = theirs[plain(name)]
        checks.append((f"{name}: size", f"sizeof(flashxla::pjrt::{name})", f"sizeof({api})"))
        for field in sorted(fields(body) & fields(api_body)):
            checks += [
                (f"{name}.{field}: {what}", f"{start}(flashxla::pjrt::{name}{at}", f"{start}({api}{at}")
                for what, start, at in (
                    ("offset", "offsetof", f", {field})"),
                    ("size", "sizeof", f"::{field})"),
                )
            ]
    printed = "".join(f'std::printf("%zu %zu\\n", {ours}, {them});' for _, ours, them in checks)
    source = f'{includes(files)}\n#include "pjrt/pjrt_abi.h"\nint main() {{ {printed} }}'
    output = run(source, version.folder, f"-I{ABI.parents[1]}").splitlines()
    for (what, *_), line in zip(checks, output, strict=True):
        ours, them = line.split()
        if ours != them:
            problems.append(f"{what} {ours}, in the API {them}")
    return problems, compared + len(checks)


def main() -> int:
    """The command; gives the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("headers", nargs="*", type=Path, help="paths of pjrt_c_api.h")
    parser.add_argument(
        "--tensorflow", nargs="+", default=[], metavar="PROJECT==VERSION", help="wheels on PyPI"
    )
    arguments = parser.parse_args()
    sources = {path.name: headers_of_path(path) for path in arguments.headers}
    sources |= {wheel: headers_of_wheel(wheel) for wheel in arguments.tensorflow}
    if not sources:
        parser.error("no version to compare with")
    with tempfile.TemporaryDirectory() as temporary:
        versions = [
            read_version(name, texts, Path(temporary) / str(at))
            for at, (name, texts) in enumerate(sources.items())
        ]
        versions.sort(key=lambda version: (version.minor, version.name))
        first, newest = versions[0], versions[-1]
        for before, version in zip([first, *versions], versions, strict=False):
            print(f"0.{version.minor} {version.name}: {len(version.functions)} functions")
            for difference in differences(before, version, known=first):
                print(f"  {difference}")
        problems, compared = mismatches(newest)
    changed = [
        text for text in differences(first, newest, known=first) if text.split()[1].rstrip(":") not in GROWN
    ]
    problems += [f"csrc/pjrt does not know that since 0.{first.minor} {text}" for text in changed]
    for problem in problems:
        print(f"{ABI.name}: {problem}")
    print(
        f"{ABI.name} and 0.{newest.minor}: {compared} sizes and places compared, {len(problems)} mismatches"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
