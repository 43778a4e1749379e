"""MkDocs hook: the site has the files outside docs/ that the pages link to.

All pages are written for GitHub, with links relative to the file. The site adds the
Markdown files of PAGES and one page with all recipes, and leads the links there. The
Markdown source of each page lies in the site, too, for programs that read llms.txt.
"""

import os
import re
import shutil
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
RESULTS = [f"benchmarks/results/{p.name}" for p in ROOT.glob("benchmarks/results/*.md")]
OTHERS = ["CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "tests/README.md"]
# Pages of the site by file of the repository.
PAGES = {"README.md": "overview.md"} | {name: name for name in [*OTHERS, *RESULTS]}
SOURCES = {page: source for source, page in PAGES.items()}
RECIPES, LLMS = "included_recipes.md", "llms.txt"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
NOTEBOOK_LINK = re.compile(r'(?<=href=")([^":#]+\.(?:md|ipynb))(#[^"]*)?(?=")')
# The second word of a code block, as in "bash network", is for the tests.
MARKED_BLOCK = re.compile(r"^(```\w+) \w+$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    contents = {page: (ROOT / source).read_text() for source, page in PAGES.items()}
    for page, content in {**contents, RECIPES: recipes_page()}.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Lead the links of a page to the site, and keep its source there."""
    markdown = site_markdown(markdown, page.file.src_uri)
    path = Path(config.site_dir, page.file.src_uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown)
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a notebook to the site; mkdocs leaves them as they are.

    Raises:
        PluginError: a page does not exist.
    """
    name = page.file.src_uri
    if not name.endswith(".ipynb"):
        return html

    def link(match: re.Match[str]) -> str:
        target, anchor = site_target(name, match[1], match[2] or "")
        file = files.get_file_from_path(target)
        if file is None:
            raise PluginError(f"{name} links to {match[1]}, which does not exist")
        return file.url_relative_to(page.file) + anchor

    return NOTEBOOK_LINK.sub(link, html)


def on_post_build(config: MkDocsConfig) -> None:
    """Add llms.txt with the site's links, and the notebooks that it links to."""
    docs, site = Path(config.docs_dir), Path(config.site_dir)
    text = (docs / LLMS).read_text()
    (site / LLMS).write_text(site_markdown(text, LLMS))
    for path in docs.glob("notebooks/*.ipynb"):
        shutil.copyfile(path, site / "notebooks" / path.name)


def recipes_page() -> str:
    """A page with the text of every included recipe."""
    parts = [
        "# Included recipes",
        "Run one with `lmx-train NAME`, and copy it with `lmx recipes copy NAME`. "
        "[Which method](methods.md) helps to choose.",
    ]
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        parts.append(f"## {path.stem}\n\n```yaml\n{path.read_text()}```")
    return "\n\n".join(parts) + "\n"


def site_markdown(markdown: str, page: str) -> str:
    """The text of a page of the site, with links to other pages of the site.

    Args:
        page: its path in the site's sources.
    """

    def link(match: re.Match[str]) -> str:
        target, anchor = site_target(page, match[1], match[2] or "")
        return os.path.relpath(target, PurePosixPath(page).parent) + anchor

    return MARKED_BLOCK.sub(r"\1", LINK.sub(link, markdown))


def site_target(page: str, target: str, anchor: str) -> tuple[str, str]:
    """Path in the site's sources, and anchor, of a link in a page."""
    source = PurePosixPath(SOURCES.get(page, f"docs/{page}"))
    path = PurePosixPath(os.path.normpath(source.parent / target))
    if path.parts[0] == "docs":
        return str(path.relative_to("docs")), anchor
    if path.parts[0] == "recipes":
        return RECIPES, f"#{path.stem}" if path.suffix else ""
    return PAGES.get(str(path), str(path)), anchor
