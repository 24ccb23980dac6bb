"""Sphinx's settings; stage.py makes the sources from README, docs, labs and the linked code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "minifsdp"
html_title = "minifsdp"
extensions = ["myst_nb"]
root_doc = "index"

nb_execution_mode = "off"  # the notebooks are shipped with their outputs, which the suite checks (nbval)
myst_heading_anchors = 4  # links to headings, as on GitHub
myst_enable_extensions = ["dollarmath"]

html_theme = "furo"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "tango"
pygments_dark_style = "monokai"
mathjax_path = "mathjax.js"  # included, so that no page needs the network

exclude_patterns = ["_static"]


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", add_texts)


def add_texts(app: Sphinx, page: str, *_: object) -> None:
    """Load the texts that excerpts come from (excerpts.py) on the search page, and on no other."""
    if page == "search":
        app.add_js_file("texts.js", defer="defer")
