# SPDX-License-Identifier: Apache-2.0
"""Makes the pages of the Python API: for each public module, what its __all__ names, which mkdocstrings fills in from the docstrings.

  python -m python_reference SOURCE OUT

SOURCE has the package lossd. The modules are read and not imported, so that neither torch nor transformers is needed.
"""

import ast
import sys
from pathlib import Path

MODULES = {"lossd": "client", "lossd.torch": "torch", "lossd.transformers": "transformers", "lossd.errors": "errors"}
ERRORS = "lossd.errors"


def tree_of(source, module):
    folder = source.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def public_names(tree):
    """What __all__ names, or the classes of a module that has none."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in statement.targets):
            return sorted(ast.literal_eval(statement.value), key=lambda name: (name.startswith("_"), name.lower()))
    return [statement.name for statement in tree.body if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_")]


def main(source, out):
    out.mkdir(parents=True)
    errors = set(public_names(tree_of(source, ERRORS)))
    for module, page in MODULES.items():
        tree = tree_of(source, module)
        lines = [f"# {module}", ast.get_docstring(tree) or ""]
        for name in public_names(tree):
            if name.startswith("__") or (module == "lossd" and name in errors):
                continue
            lines.append(f"::: {module}.{name}")
        (out / f"{page}.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
