# SPDX-License-Identifier: Apache-2.0
"""Copies the pages of the repository, and the files that they link to, into a folder that MkDocs reads.

  python -m stage TREE OUT

The folders stay as they are, so links between pages do, too.
"""

import re
import shutil
import sys
from pathlib import Path

PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**/*.md", "bench/results/README.md",
         "tests/judge/README.md", "tests/client/golden/README.md", "client/python/README.md",
         "client/README.md", "kernels/README.md", "kernels/cuda/README.md", "proto/README.md", "server/*/README.md", "tests/README.md"]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def pages(tree):
    return sorted({path for pattern in PAGES for path in tree.glob(pattern)})


def linked_files(tree, page):
    """The files of the tree, pages left out, that `page` links to."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if "://" not in target and path.is_file() and path.suffix != ".md" and path.is_relative_to(tree):
            yield path


def main(tree, out):
    tree = tree.resolve()
    found = pages(tree)
    for path in found + sorted({file for page in found for file in linked_files(tree, page)}):
        target = out / path.relative_to(tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
