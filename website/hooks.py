"""What `make docs` does to the pages of docs/ on their way to the site (MkDocs hooks).

The pages are written to be read in the repository: they link to its files, and README is their first page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """README is the first page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    # In README the pages of docs/ are a folder below.
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\((?:\./)?docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A link to a file that is not on the site is its name."""

    def link(match: re.Match[str]) -> str:
        text, target, _ = match.groups()
        if "://" in target or files.get_file_from_path(target) or target.startswith("benchmarks/"):
            return match[0]
        path = target.removeprefix("../")
        assert (ROOT / path).exists(), f"{page.file.src_path}: {target} is not there"
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(link, markdown)
