"""Sphinx's settings; stage.py makes the sources from README, docs, labs and the linked code."""

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
html_show_search_summary = False  # it is fetched, which a page opened from disk cannot do
pygments_style = "tango"
pygments_dark_style = "monokai"
mathjax_path = "mathjax.js"  # included, so that no page needs the network

exclude_patterns = ["_static"]
