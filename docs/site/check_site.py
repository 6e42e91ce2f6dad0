# SPDX-License-Identifier: Apache-2.0
"""Checks a site that MkDocs has built.

  python -m check_site SITE PAGES

- Every link and resource of every page is part of the site, and every anchor is there; addresses of other sites occur in <a> alone.
- The search finds pages by words of their own, without a network: its index is part of the site.
- Every page has as many headings, list items, table cells and blocks of code as repository browsers show for it (CommonMark with
  tables); so no list or table became a paragraph.

Prints each fault; exit status 1 if there is one.
"""

import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt

# What a page loads by itself, as against what a reader follows.
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("object", "data"),
          ("use", "href"), ("image", "href"), ("embed", "src")}
FOLLOWED = {("a", "href")}
COUNTED = {"h1", "h2", "h3", "h4", "li", "tr", "td", "th", "pre", "img", "blockquote"}
# Words that a reader may look for, and a page that has to be among what is found.
SEARCHES = {"ComputeLoss": "reference/protocol/loss.html", "LossHead": "reference/python/torch.html", "liveness_timeout": "docs/reference/flags.html",
            "lossd_rows_total": "docs/reference/metrics.html", "incarnation": "docs/glossary.html", "Megatron": "docs/training/megatron.html"}


class Page(HTMLParser):
    """What a page links to, loads and shows."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.shown = Counter()
        self._depth = 0  # within <article>, where the text of the page is
        self._highlight = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "article":
            self._depth += 1
        if self._depth and tag in COUNTED:
            self.shown[tag] += 1
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        for name, value in attributes:
            if value and (tag, name) in FOLLOWED:
                self.links.append(value)
            elif value and (tag, name) in LOADED and values.get("rel") not in ("canonical", "prev", "next"):
                self.loads.append(value)
            elif value and name == "style":
                self.loads += re.findall(r"url\(['\"]?([^'\")]+)", value)

    def handle_endtag(self, tag):
        if tag == "article":
            self._depth -= 1


def is_elsewhere(address):
    return bool(urlsplit(address).scheme or urlsplit(address).netloc)


def check_links(site, pages):
    for path, page in pages.items():
        name = path.relative_to(site)
        for address in page.loads:
            if urlsplit(address).scheme != "data" and is_elsewhere(address):
                yield f"{name}: loads {address} from elsewhere"
        for address in page.links + page.loads:
            if is_elsewhere(address):
                continue
            parts = urlsplit(address)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{name}: {address} does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids | {"__top"}:
                yield f"{name}: {address} has no such anchor"


def check_styles(site):
    for path in site.rglob("*.css"):
        for address in re.findall(r"(?:url\(|@import )['\"]?([^'\")]+)", path.read_text(encoding="utf-8")):
            if urlsplit(address).scheme != "data" and is_elsewhere(address):
                yield f"{path.relative_to(site)}: loads {address} from elsewhere"


def check_search(site):
    text = (site / "search/search_index.js").read_text(encoding="utf-8")
    entries = json.loads(text[text.index("{"):text.rindex("}") + 1])["docs"]
    for word, page in SEARCHES.items():
        found = {entry["location"].split("#")[0] for entry in entries if word.lower() in (entry["title"] + entry["text"]).lower()}
        if page not in found:
            yield f"search: {word} does not find {page}"


def check_shown(site, sources, pages):
    browser = MarkdownIt("commonmark").enable("table")
    for source in sorted(sources.rglob("*.md")):
        text = source.read_text(encoding="utf-8")
        if "\n::: " in text:  # filled in by mkdocstrings
            continue
        relative = source.relative_to(sources)
        path = site / relative.with_suffix(".html")
        if relative.name == "README.md":
            path = path.with_name("index.html")
        expected = Counter(tag for tag in re.findall(r"<([a-z][a-z0-9]*)[ />]", browser.render(text)) if tag in COUNTED)
        if pages[path].shown != expected:
            differences = [f"{pages[path].shown[tag]} <{tag}> instead of {expected[tag]}" for tag in sorted(COUNTED) if pages[path].shown[tag] != expected[tag]]
            yield f"{relative}: the site shows {', '.join(differences)}"


def main(site, sources):
    site = site.resolve()
    pages = {path: Page(path) for path in site.rglob("*.html")}
    faults = [*check_links(site, pages), *check_styles(site), *check_search(site), *check_shown(site, sources, pages)]
    for fault in faults:
        print(fault)
    print(f"{len(pages)} pages, {sum(len(page.links) for page in pages.values())} links, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
