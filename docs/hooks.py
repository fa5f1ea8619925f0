"""MkDocs hook: the site carries files outside of docs/ that pages link to, and shows notebooks as pages.

A file such as CONTRIBUTING.md or examples/02_plain_loop.py becomes project/CONTRIBUTING.md or
project/examples/02_plain_loop.py in the site. Links to it, and links from it to docs/, are rewritten.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
CODE = re.compile(r"`[^`\n]+`")
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "NOTICES.md", "SECURITY.md")


def in_repository(uri: str) -> str:
    """The path in the repository of a file of the site."""
    return uri.removeprefix("project/") if uri.startswith("project/") else f"docs/{uri}"


def in_site(path: str) -> str:
    """The path in the site of a file of the repository. README is the start page, a notebook is a page."""
    if path == "README.md":
        return "index.md"
    if path.endswith(".ipynb"):
        path = f"{path.removesuffix('.ipynb')}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"project/{path}"


def linked(text: str, uri: str) -> set[str]:
    """Files of the repository that a page links to."""
    folder = posixpath.dirname(in_repository(uri))
    return {posixpath.normpath(posixpath.join(folder, target)) for target in LINK.findall(text)}


def as_page(notebook: Path) -> str:
    """The cells of a notebook as Markdown."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook.read_text())["cells"]]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        page = in_site(notebook.relative_to(ROOT).as_posix())
        files.append(File.generated(config, page, content=as_page(notebook)))
    sources = [file for file in files if file.src_uri.endswith(".md")]
    wanted = set(PAGES).union(*(linked(file.content_string, file.src_uri) for file in sources))
    wanted |= set().union(*(linked((ROOT / page).read_text(), f"project/{page}") for page in PAGES))
    for path in sorted(wanted):
        if not path.startswith("docs/") and path != "README.md" and (ROOT / path).is_file():
            files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    folder = posixpath.dirname(in_repository(uri))

    def moved(link: re.Match[str]) -> str:
        target = in_site(posixpath.normpath(posixpath.join(folder, link[1])))
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    lines = LINK.sub(moved, markdown).splitlines()
    # GitHub wants `a \| b` in a table, MkDocs `a | b`.
    return "\n".join(CODE.sub(lambda code: code[0].replace(r"\|", "|"), x) if x[:1] == "|" else x for x in lines)
