"""Reads what XLA compiled: copies in an optimized HLO module, and the memory it sets aside."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

_BITS = {"pred": 8, "bf16": 16}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.+?) (?P<opcode>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"(?P<type>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,]*)\]")
_COPIES = ("copy", "copy-start", "async-copy")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its optimized HLO text, and the bytes of memory it needs beside its arguments."""

    name: str
    text: str
    temp_bytes: int

    def targets(self) -> list[str]:
        """The custom call targets, in order of appearance."""
        return re.findall(r'custom_call_target="([^"]+)"', self.text)

    def copies(self, at_least: int) -> list[str]:
        """The instructions that copy an array of `at_least` bytes or more, fused ones too."""
        found = []
        for line in self.text.splitlines():
            match = _INSTRUCTION.match(line)
            if match and match["opcode"] in _COPIES and array_bytes(match["shape"]) >= at_least:
                found.append(line.strip())
        return found


def array_bytes(shape: str) -> int:
    """The bytes of the largest array in a shape such as f32[4,2]{1,0} or a tuple of them."""
    sizes = [0]
    for array in _ARRAY.finditer(shape):
        digits = re.search(r"\d+", array["type"])
        bits = _BITS.get(array["type"]) or (int(digits[0]) if digits else 8)
        sizes.append(math.prod(int(d) for d in array["dims"].split(",") if d) * bits // 8)
    return max(sizes)


def dumped_programs(folder: Path) -> list[Program]:
    """The programs in a folder that XLA dumped to (XLA_FLAGS=--xla_dump_to=... --xla_dump_hlo_as_text)."""
    programs = []
    for path in sorted(folder.glob("*after_optimizations.txt")):
        assignment = path.with_name(path.name.replace(".txt", "-buffer-assignment.txt"))
        temp = (
            re.findall(r"size (\d+), (?:page \d+, )?preallocated-temp", assignment.read_text())
            if assignment.exists()
            else []
        )
        # module_0001.jit_step.cpu_after_optimizations.txt, or of a GPU .sm_9.0_gpu_after_optimizations.txt
        name = re.split(r"\.(?:cpu|sm_[\d.]+_gpu)_", path.name)[0]
        programs.append(Program(name, path.read_text(), sum(map(int, temp))))
    return programs
