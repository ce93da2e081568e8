"""Syntax highlighting as spans with one-letter classes; the spans' text is exactly the code."""

from __future__ import annotations

from functools import cache
from html import escape
from itertools import groupby
from typing import Any

from pygments.lexer import Lexer
from pygments.lexers import find_lexer_class
from pygments.token import Comment, Generic, Keyword, Literal, Name, Number, Operator, String, Token, _TokenType

MAX_CHARACTERS = 60_000
"""Maximum characters of highlighted code."""

_LEXERS = {
    "Bash": "bash sh shell zsh",
    "Bash Session": "console shell-session",
    "Batchfile": "bat batch",
    "C": "c h",
    "C#": "csharp cs c#",
    "C++": "cpp c++ cc cxx hpp",
    "CMake": "cmake",
    "CSS": "css",
    "CUDA": "cuda cu",
    "Clojure": "clojure clj",
    "Dart": "dart",
    "Diff": "diff patch udiff",
    "Docker": "docker dockerfile",
    "Elixir": "elixir ex exs",
    "Erlang": "erlang erl",
    "F#": "fsharp f#",
    "Fortran": "fortran f90",
    "GLSL": "glsl",
    "Go": "go golang",
    "GraphQL": "graphql",
    "Groovy": "groovy",
    "HTML": "html htm xhtml vue svelte",
    "Haskell": "haskell hs",
    "INI": "ini cfg conf",
    "JSON": "json jsonc json5 jsonl",
    "Java": "java",
    "JavaScript": "javascript js jsx mjs node",
    "Julia": "julia jl",
    "Kotlin": "kotlin kt",
    "LLVM": "llvm",
    "Lua": "lua",
    "Makefile": "make makefile mk",
    "Markdown": "markdown md",
    "Matlab": "matlab octave",
    "NASM": "nasm asm assembly",
    "Nginx configuration file": "nginx",
    "OCaml": "ocaml ml",
    "Objective-C": "objective-c objc",
    "PHP": "php",
    "Perl": "perl pl",
    "PowerShell": "powershell ps1 pwsh",
    "Protocol Buffer": "protobuf proto",
    "Python": "python py python3 py3 pyi",
    "Python Traceback": "pytb traceback",
    "Python console session": "pycon",
    "S": "r",
    "Ruby": "ruby rb",
    "Rust": "rust rs",
    "SCSS": "scss sass",
    "SQL": "sql sqlite postgresql postgres mysql",
    "Scala": "scala",
    "Scheme": "scheme lisp racket",
    "Swift": "swift",
    "TOML": "toml",
    "TeX": "tex latex",
    "Terraform": "terraform hcl tf",
    "TypeScript": "typescript ts tsx",
    "VB.net": "vb vb.net",
    "VimL": "vim",
    "XML": "xml svg",
    "YAML": "yaml yml",
    "Zig": "zig",
    "verilog": "verilog v",
}
"""Pygments' lexer name → language names in fences. Only these can be chosen by untrusted text."""

_NAMED = {alias: name for name, aliases in _LEXERS.items() for alias in aliases.split()}

_CLASSES = {
    Comment: "c",
    Comment.Preproc: "k",
    Keyword: "k",
    Keyword.Type: "t",
    Literal: "s",
    String: "s",
    Number: "n",
    Name.Attribute: "a",
    Name.Builtin: "b",
    Name.Class: "f",
    Name.Decorator: "a",
    Name.Exception: "b",
    Name.Function: "f",
    Name.Namespace: "f",
    Name.Tag: "k",
    Operator.Word: "k",
    Generic.Deleted: "d",
    Generic.Heading: "f",
    Generic.Inserted: "i",
    Generic.Output: "c",
    Generic.Prompt: "a",
    Generic.Subheading: "f",
}


def colored(source: str, language: str) -> str:
    """HTML of code: escaped, with spans if its language is known and it is not too long."""
    lexer = _lexer(_NAMED.get(language, ""))
    if lexer is None or len(source) > MAX_CHARACTERS:
        return escape(source)
    pieces = [(_class(kind), text) for kind, text in lexer.get_tokens(source)]
    # Lexers drop what they take for padding, such as a byte order mark.
    if "".join(text for _, text in pieces) != source:
        return escape(source)
    return "".join(
        _span(name, "".join(text for _, text in group)) for name, group in groupby(pieces, key=lambda piece: piece[0])
    )


def _span(name: str, text: str) -> str:
    return f'<span class="{name}">{escape(text)}</span>' if name else escape(text)


@cache
def _lexer(name: str) -> Lexer | None:
    found: Any = find_lexer_class(name) if name else None
    return found(stripnl=False, ensurenl=False) if found else None


@cache
def _class(kind: _TokenType) -> str:
    while kind is not Token:
        if kind in _CLASSES:
            return _CLASSES[kind]
        kind = kind.parent
    return ""
