"""The site: every page of the repository, by Sphinx with MyST and the theme furo.

::

    python -m sphinx -E -W --keep-going -c docs . out/site     as `make site` does

Sources are the Markdown files as they lie in the repository, so that a link works there and here. The pages, their
order and their headings in the navigation are those of ``docs/index.md``. Links to explorers open them; links to other
files of the repository open a page with their text. Nothing is loaded from elsewhere: the site can be read from a disk.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cute_softmax import __version__  # noqa: E402

INDEX = ROOT / "docs" / "index.md"
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml"}

project = "cute_softmax"
release = __version__
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "dist", "out", "cute_softmax", "layouts", "tests", "benchmarks/results"]
extensions = ["myst_parser"]
nitpicky = True
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """(heading, links) of each part of the index, paths from the repository's root."""
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        heading, _, body = part.partition("\n")
        links = re.findall(r"^\| \[.*?\]\((\S+?\.md)\)", body, re.M)
        yield heading, [(INDEX.parent / link).resolve().relative_to(ROOT).as_posix() for link in links]


def navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """The index's parts, as the navigation of the front page, where they are not shown."""
    if docname == root_doc:
        for heading, links in sections(INDEX.read_text(encoding="utf-8")):
            pages = "\n".join(f"/{link}" for link in links)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{pages}\n```\n"


class FilesOfTheRepository(SphinxTransform):
    """Links to files that are no pages: to an explorer itself, or to a page with a file's text."""

    default_priority = 400

    def apply(self, **_: object) -> None:
        for node in list(self.document.findall(addnodes.download_reference)):
            target, _ = self.env.relfn2path(node["reftarget"], self.env.docname)
            page = target if target.endswith(".html") else f"{target}.html"
            known = self.env.cute_softmax_files = getattr(self.env, "cute_softmax_files", set())
            known.add(target)
            to = relative_uri(f"{self.env.docname}.html", page)
            link = nodes.reference("", "", *node.children, refuri=to, internal=True)
            node.replace_self(link)


def linked_files(app: Sphinx) -> Iterator[tuple[str, dict, str]]:
    """A page for each file that a link names, and the explorers as they are."""
    for target in sorted(getattr(app.env, "cute_softmax_files", ())):
        path = ROOT / target
        if path.suffix == ".html":
            place = app.outdir / target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            continue
        text = path.read_text(encoding="utf-8")
        shown = app.builder.highlighter.highlight_block(text, LANGUAGES.get(path.suffix, "text"))
        body = f"<h1><code>{target}</code></h1>\n{shown}"
        yield target, {"title": target, "body": body, "toc": "", "display_toc": False}, "page.html"


def full_size(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """A figure leads to itself: on a phone that is how to see all of it."""
    for image in list(doctree.findall(nodes.image)):
        if image["uri"] not in app.env.images:  # missing, as the build has said
            continue
        _, name = app.env.images[image["uri"]]
        to = relative_uri(app.builder.get_target_uri(docname), f"_images/{name}")
        if not isinstance(image.parent, nodes.reference):
            link = nodes.reference("", "", image.deepcopy(), refuri=to, internal=True, classes=["figure"])
            image.replace_self(link)


def levels(app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    """Captions of the navigation say that they are headings, but not of which level."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def first_page(app: Sphinx, failed: Exception | None) -> None:
    """The folder itself opens the front page."""
    if not failed and app.builder.name == "html":
        to = app.builder.get_target_uri(root_doc)
        head = (
            f'<meta charset="utf-8"><title>{project}</title><meta http-equiv="refresh" content="0; url={to}">'
        )
        text = f'<!DOCTYPE html>\n<html lang="en">{head}<a href="{to}">{project}</a></html>\n'
        (app.outdir / "index.html").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict:
    """What Sphinx calls."""
    app.connect("source-read", navigation)
    app.add_transform(FilesOfTheRepository)
    app.connect("html-collect-pages", linked_files)
    app.connect("doctree-resolved", full_size)
    app.connect("html-page-context", levels, priority=900)  # when the theme has made it
    app.connect("build-finished", first_page)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
