"""Finds the FFI registry of the XLA runtime inside torch_xla.

torch_xla 2.9 hides its XLA symbols and its own registration call is a stub that raises. The accessor of the FFI
API table is still in the shared object's symbol table, so its address is read from there.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from pathlib import Path

_EXPORTED = "XLA_FFI_GetApi"  # up to torch_xla 2.8
_LOCAL = b"_ZN3xla3ffi12GetXlaFfiApiEv"  # xla::ffi::GetXlaFfiApi()
_SHT_SYMTAB = 2


@functools.cache
def ffi_api() -> int:
    """The address of torch_xla's XLA_FFI_Api table."""
    import torch_xla  # noqa: F401  (loads the libraries that _XLAC needs)
    import _XLAC  # isort: skip

    path = Path(_XLAC.__file__)
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p)
    try:
        return get_api((_EXPORTED, ctypes.CDLL(str(path))))()
    except AttributeError:
        return get_api(_load_address(path) + _symbol_offset(path, _LOCAL))()


def _load_address(path: Path) -> int:
    """Where the dynamic loader put the start of a shared object."""
    real = str(path.resolve())
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == real and fields[2] == "00000000":
            return int(fields[0].split("-")[0], 16)
    raise RuntimeError(f"flashxla: {path.name} is not loaded in this process")


def _symbol_offset(path: Path, symbol: bytes) -> int:
    """The value of a symbol, from the section headers of a 64-bit little-endian ELF file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        (section_table,) = struct.unpack_from("<Q", elf, 0x28)
        entry_size, count = struct.unpack_from("<HH", elf, 0x3A)
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", elf, section_table + i * entry_size) for i in range(count)
        ]
        for _, kind, _, _, offset, size, link, _, _, symbol_size in sections:
            if kind != _SHT_SYMTAB:
                continue
            names_offset, names_size = sections[link][4:6]
            at = elf.find(b"\0" + symbol + b"\0", names_offset, names_offset + names_size)
            if at < 0:
                continue
            name = struct.pack("<I", at + 1 - names_offset)
            position = elf.find(name, offset, offset + size)
            while position >= 0 and (position - offset) % symbol_size != 0:
                position = elf.find(name, position + 1, offset + size)
            if position >= 0:
                return struct.unpack_from("<Q", elf, position + 8)[0]
    raise RuntimeError(
        f"flashxla: {path.name} has no symbol {symbol.decode()}: this build of torch_xla cannot take custom calls; "
        "supported: the torch_xla 2.9.0 wheel of PyPI"
    )
