"""English text that every Python installation carries, for `train_tiny.py`.

Sources: docstrings and comments of the standard library's modules, docstrings of its compiled modules, and
the language reference behind `help("for")`. The text belongs to the Python Software Foundation (PSF-2.0).
Run alone, this prints how much there is.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 3
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMMENT_BLOCK = re.compile(r"(?m)(?:^[ \t]*#.*\n){2,}")
ASCII_PUNCTUATION = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "`": "'"})
BULLET = re.compile(r"^(?:[-*+•]|\d+[.)])\s+")


@dataclass(frozen=True)
class Document:
    """The prose of one module or one topic of the language reference: paragraphs joined by blank lines."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether this document is kept for evaluation; decided by its name only, so it is stable."""
        return zlib.crc32(self.name.encode()) % 100 < HELD_OUT_PERCENT


def source_texts(stdlib: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (module name, its docstrings and comments in source order) for the library's .py files."""
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.parts[0] == "pydoc_data":
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        found = [
            (getattr(node, "lineno", 0), ast.get_docstring(node) or "")
            for node in ast.walk(tree)
            if isinstance(node, DEFINITIONS)
        ]
        for block in COMMENT_BLOCK.finditer(source):
            text = re.sub(r"(?m)^[ \t]*#+ ?", "", block.group())
            found.append((source.count("\n", 0, block.start()) + 1, text))
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        yield name, [text for _, text in sorted(found)]


def compiled_texts() -> Iterator[tuple[str, list[str]]]:
    """Yield (module name, its docstrings) for the standard modules that are written in C.

    Only those are imported: importing every module of the library would open windows and browsers.
    """
    for name in sorted(sys.stdlib_module_names):
        if name.startswith(("_test", "_xx")):
            continue
        spec = importlib.util.find_spec(name) if name not in sys.builtin_module_names else None
        suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
        if name not in sys.builtin_module_names and not (spec and spec.origin and spec.origin.endswith(suffixes)):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        docs = [module.__doc__]
        for _, member in sorted(vars(module).items()):
            docs.append(inspect.getdoc(member) if callable(member) else None)
            if inspect.isclass(member):
                docs.extend(getattr(attribute, "__doc__", None) for _, attribute in sorted(vars(member).items()))
        yield name, [inspect.cleandoc(text) for text in docs if isinstance(text, str)]


def reference_texts() -> Iterator[tuple[str, list[str]]]:
    """Yield (topic, [text]) for the language reference that `help("topic")` shows."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"topic {name}", [text]


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring or comment, each unwrapped into one line; so are list items."""
    for block in re.split(r"\n\s*\n", text.translate(ASCII_PUNCTUATION)):
        lines: list[str] = []
        for line in block.splitlines():
            line = line.strip()
            if BULLET.match(line) and lines:
                yield " ".join(lines)
                lines = []
            lines.append(BULLET.sub("", line))
        yield re.sub(r"\s+", " ", " ".join(lines)).strip()


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is English sentences, rather than code, a table, a grammar or a fragment."""
    words = paragraph.split()
    if len(words) < 5 or not paragraph.isprintable() or ">>>" in paragraph or "::=" in paragraph:
        return False
    first, last = paragraph[0], paragraph[-1]
    if not (first.isalnum() or first in "\"'(") or last not in ".:!?)\"'":
        return False
    plain = sum(word.strip(".,;:!?()\"'`*").replace("-", "").replace("'", "").isalpha() for word in words)
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return paragraph.isascii() and plain / len(words) > 0.75 and letters / len(paragraph) > 0.88


def gather_documents() -> list[Document]:
    """Read all text of this Python's documentation as documents; no paragraph occurs twice in the whole."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    documents = []
    for sources in (source_texts(stdlib), compiled_texts(), reference_texts()):
        for name, texts in sources:
            kept = []
            for paragraph in (piece for text in texts for piece in paragraphs(text)):
                key = paragraph.lower()
                if key not in seen and is_prose(paragraph):
                    seen.add(key)
                    kept.append(paragraph)
            if kept:
                documents.append(Document(name, "\n\n".join(kept)))
    return documents


if __name__ == "__main__":
    everything = gather_documents()
    print(f"{len(everything)} documents, {sum(len(document.text) for document in everything):,} characters")
