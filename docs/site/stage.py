# SPDX-License-Identifier: Apache-2.0
"""What MkDocs reads: the pages of the repository in a folder, and its configuration.

  python -m stage pages TREE OUT
  python -m stage configuration TEMPLATE TREE SOURCE PAGES MKDOCS_YML SITE
"""

import re
import shutil
import sys
from pathlib import Path

import yaml


# Copies the pages of the repository, and the files that they link to. The folders stay as they are, so links between pages do, too.

PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**/*.md", "bench/results/*.md",
         "tests/judge/README.md", "tests/faults/README.md", "tests/client/golden/README.md", "client/python/README.md", "deploy/kubernetes/README.md",
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


def stage_pages(tree, out):
    tree = tree.resolve()
    found = pages(tree)
    for path in found + sorted({file for page in found for file in linked_files(tree, page)}):
        target = out / path.relative_to(tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


# Writes MkDocs's configuration: docs/site/mkdocs.yml with the folders of this build, and with the pages of folders in the navigation.
#
# An entry of the navigation that ends with /* stands for the pages of that folder that no other entry names, by name.


def named(entries):
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from named(value) if isinstance(value, list) else [value]


def expanded(entries, pages, known):
    result = []
    for entry in entries:
        if isinstance(entry, dict):
            result.append({title: expanded(value, pages, known) if isinstance(value, list) else value for title, value in entry.items()})
        elif entry.endswith("/*"):
            found = sorted(str(path.relative_to(pages)) for path in (pages / entry[:-2]).glob("*.md"))
            result += [path for path in found if path not in known]
        else:
            result.append(entry)
    return result


def configure(template, tree, source, pages, mkdocs_yml, site):
    configuration = yaml.safe_load(template.read_text(encoding="utf-8"))
    configuration["nav"] = expanded(configuration["nav"], pages, set(named(configuration["nav"])))
    configuration["docs_dir"], configuration["site_dir"] = str(pages), str(site)
    configuration["copyright"] = f"lossd {(tree / 'VERSION').read_text().strip()}, Apache License 2.0"
    configuration["theme"]["custom_dir"] = str((tree / "docs/site/theme").resolve())
    for plugin in configuration["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            plugin["mkdocstrings"]["handlers"]["python"]["paths"] = [str(source)]
    # The slugs of repository browsers, of which links in the pages speak; YAML cannot name a function safely.
    text = yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True)
    slugify = "!!python/object/apply:pymdownx.slugs.slugify\n      kwds: {case: lower}"
    mkdocs_yml.write_text(text.replace("slugify: github", f"slugify: {slugify}"), encoding="utf-8")


if __name__ == "__main__":
    {"pages": stage_pages, "configuration": configure}[sys.argv[1]](*map(Path, sys.argv[2:]))
