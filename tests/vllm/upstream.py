"""The upstream code that overrides rely on, as hashes of its source: python -m tests.vllm.upstream writes them anew."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from pathlib import Path

FILE = Path(__file__).with_name("upstream.json")


def recorded() -> dict[str, str]:
    """The hashes of the versions that the overrides were written for."""
    return json.loads(FILE.read_text())


@functools.cache  # asked for each override
def installed() -> dict[str, str]:
    """The hashes of what is installed, by the names in OVERRIDES; a name that is gone has the hash "missing"."""
    from flashxla_vllm.overrides import OVERRIDES

    return {name: hash_of(name) for name in sorted({name for names in OVERRIDES.values() for name in names})}


def hash_of(name: str) -> str:
    """The hash of "module:name" or "module" as it is installed, or "missing"."""
    module, _, qualified = name.partition(":")
    package, *rest = module.split(".")
    root = Path(importlib.util.find_spec(package).origin).parent
    file = root.joinpath(*rest)
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    if not file.exists():
        return "missing"
    source = file.read_text()
    found = source if not qualified else _segment(source, qualified.split("."))
    return hashlib.sha256(found.encode()).hexdigest()[:16] if found else "missing"


def replacements(file: Path) -> list[str]:
    """What a source file does to modules and classes that it has imported: assignments to their attributes."""
    tree = ast.parse(file.read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    targets = [t for node in ast.walk(tree) if isinstance(node, ast.Assign) for t in node.targets]
    return [
        ast.unparse(target)
        for target in targets
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id in imported
    ]


def _segment(source: str, path: list[str]) -> str | None:
    node: ast.AST = _parsed(source)
    for name in path:
        matching = [child for child in ast.iter_child_nodes(node) if name in _names(child)]
        if not matching:
            return None
        node = matching[-1]
    return ast.get_source_segment(source, node)


@functools.cache
def _parsed(source: str) -> ast.AST:
    return ast.parse(source)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


if __name__ == "__main__":
    FILE.write_text(json.dumps(installed(), indent=1) + "\n")
