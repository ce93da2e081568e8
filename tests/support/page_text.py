"""The pages that readers get, README, CONTRIBUTING.md and docs/, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
"""Path from the root → text."""


def code_blocks(text: str, language: str) -> list[str]:
    """What stands between fences of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def without_code(text: str) -> str:
    """The page without fenced blocks and without `code`."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def section(text: str, heading: str) -> str:
    """From a heading of the second level to the next one of that level or the end.

    Raises:
        KeyError: there is none of that name.
    """
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        if name == heading:
            return body
    raise KeyError(heading)


def anchors(text: str) -> set[str]:
    """Of all headings, as GitHub makes them: lower case, hyphens for spaces, letters and digits otherwise."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    """Targets of links and images, in Markdown and in HTML, that stay in the repository."""
    prose = without_code(text)
    found = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    return [target for target in found if not re.match(r"https?:", target)]
