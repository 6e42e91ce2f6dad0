# SPDX-License-Identifier: Apache-2.0
"""Makes the pages of the reference: of the protocol, of the Python API, and of the programs.

  python -m reference protocol DESCRIPTOR_SET OUT
  python -m reference python SOURCE OUT
  python -m reference programs BIN OUT
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2


# Makes pages of the protocol from its .proto files: every service, message and enumeration with its comments.
#
# DESCRIPTOR_SET is what protoc writes with --include_imports --include_source_info. A page for each file of the package lossd.v1,
# and index.md, which lists them.

PACKAGE = "lossd.v1"
FIELD, FILE = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FileDescriptorProto
SERVICE, METHOD = FILE.SERVICE_FIELD_NUMBER, descriptor_pb2.ServiceDescriptorProto.METHOD_FIELD_NUMBER
MESSAGE, ENUM = FILE.MESSAGE_TYPE_FIELD_NUMBER, FILE.ENUM_TYPE_FIELD_NUMBER
MESSAGE_FIELD, VALUE = (descriptor_pb2.DescriptorProto.FIELD_FIELD_NUMBER,
                        descriptor_pb2.EnumDescriptorProto.VALUE_FIELD_NUMBER)


def escape(text):
    """`code` stays what it is."""
    parts = re.split(r"(`[^`|]+`)", text)
    return "".join(part if odd else re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", part) for odd, part in ((n % 2, part) for n, part in enumerate(parts)))


def kind_of(line, before):
    if not line.strip():
        return "blank"
    if line.startswith("- ") or (before == "list" and line.startswith("  ")):
        return "list"
    return "shape" if line.startswith("  ") or re.search(r"\S {3,}\S", line) else "text"


def paragraphs(comment):
    """The comment as Markdown. Lines that are set in, or have columns, keep their shape."""
    blocks = []
    for line in comment.splitlines():
        line = line[1:] if line.startswith(" ") else line
        kind = kind_of(line, blocks[-1][0] if blocks else "")
        if blocks and blocks[-1][0] == kind:
            blocks[-1][1].append(line)
        else:
            blocks.append((kind, [line]))
    return "\n\n".join("```text\n" + "\n".join(lines) + "\n```" if kind == "shape" else escape("\n".join(lines))
                       for kind, lines in blocks if kind != "blank")


class Page:
    """One .proto file."""

    def __init__(self, file, homes):
        self._file = file
        self._homes = homes  # the page of each type, by full name
        self._comments = {tuple(location.path): location for location in file.source_code_info.location}

    def markdown(self):
        intro = self._comments.get((FILE.SYNTAX_FIELD_NUMBER,))
        parts = [f"# {self._file.name}", paragraphs(intro.leading_comments) if intro else ""]
        for index, service in enumerate(self._file.service):
            parts += self._service(service, (SERVICE, index))
        for index, message in enumerate(self._file.message_type):
            parts += self._message(message, (MESSAGE, index))
        for index, enum in enumerate(self._file.enum_type):
            parts += self._enum(enum, (ENUM, index))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _comment(self, path):
        location = self._comments.get(path)
        return "\n\n".join(text for text in (location.leading_comments, location.trailing_comments) if text) if location else ""

    def _cell(self, path):
        return escape(" ".join(self._comment(path).split()))

    def _type(self, full_name):
        name = full_name.lstrip(".")
        if name not in self._homes:
            return f"`{name}`"
        page, heading = self._homes[name]
        return f"[{heading}]({'' if page == page_name(self._file) else page}#{heading.lower()})"

    def _service(self, service, path):
        yield f"## {service.name}"
        yield paragraphs(self._comment(path))
        for index, method in enumerate(service.method):
            takes = ("stream " if method.client_streaming else "") + self._type(method.input_type)
            gives = ("stream " if method.server_streaming else "") + self._type(method.output_type)
            yield f"### {service.name}.{method.name}"
            yield f"takes {takes}, answers {gives}"
            yield paragraphs(self._comment((*path, METHOD, index)))

    def _message(self, message, path, outer=""):
        if message.options.map_entry:
            return
        name = f"{outer}{message.name}"
        yield f"## {name}"
        yield paragraphs(self._comment(path))
        if message.field:
            rows = ["| field | number | type | meaning |", "|---|---|---|---|"]
            rows += [f"| `{field.name}` | {field.number} | {self._field_type(message, field)} | {self._cell((*path, MESSAGE_FIELD, index))} |"
                     for index, field in enumerate(message.field)]
            yield "\n".join(rows)
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, (*path, descriptor_pb2.DescriptorProto.NESTED_TYPE_FIELD_NUMBER, index), f"{name}.")
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, descriptor_pb2.DescriptorProto.ENUM_TYPE_FIELD_NUMBER, index), f"{name}.")

    def _field_type(self, message, field):
        if field.type in (FIELD.TYPE_MESSAGE, FIELD.TYPE_ENUM):
            shown = self._type(field.type_name)
        else:
            shown = FIELD.Type.Name(field.type).removeprefix("TYPE_").lower()
        if field.label == FIELD.LABEL_REPEATED:
            return f"repeated {shown}"
        if field.proto3_optional:
            return f"optional {shown}"
        return f"{shown}, one of `{message.oneof_decl[field.oneof_index].name}`" if field.HasField("oneof_index") else shown

    def _enum(self, enum, path, outer=""):
        yield f"## {outer}{enum.name}"
        yield paragraphs(self._comment(path))
        rows = ["| value | number | meaning |", "|---|---|---|"]
        rows += [f"| `{value.name}` | {value.number} | {self._cell((*path, VALUE, index))} |" for index, value in enumerate(enum.value)]
        yield "\n".join(rows)


def page_name(file):
    return Path(file.name).stem + ".md"


def homes_of(files):
    """Full name of each type -> page and heading."""
    homes = {}

    def add(file, message, outer):
        name = f"{outer}{message.name}"
        homes[f"{PACKAGE}.{name}"] = (page_name(file), name)
        for each in [*getattr(message, "nested_type", []), *getattr(message, "enum_type", [])]:
            add(file, each, f"{name}.")

    for file in files:
        for each in [*file.message_type, *file.enum_type]:
            add(file, each, "")
    # The anchor of a heading has no dots.
    return {name: (page, heading) for name, (page, heading) in homes.items()}


def protocol_reference(descriptors, out):
    files = [file for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes()).file if file.package == PACKAGE]
    homes = homes_of(files)
    out.mkdir(parents=True)
    index = ["# Messages and services", f"The package `{PACKAGE}`, made from its `.proto` files. The page about the protocol explains how they are used."]
    for file in sorted(files, key=lambda file: (not file.service, file.name)):
        (out / page_name(file)).write_text(Page(file, homes).markdown(), encoding="utf-8")
        named = ", ".join([service.name for service in file.service] or [message.name for message in file.message_type])
        index.append(f"- [{file.name}]({page_name(file)}): {named}")
    (out / "index.md").write_text("\n\n".join(index[:2]) + "\n\n" + "\n".join(index[2:]) + "\n", encoding="utf-8")


# Makes the pages of the Python API: for each public module, what its __all__ names, which mkdocstrings fills in from the docstrings.
#
# SOURCE has the package lossd. The modules are read and not imported, so that neither torch nor transformers is needed.

MODULES = {"lossd": "client", "lossd.torch": "torch", "lossd.torch.sequences": "sequences", "lossd.transformers": "transformers", "lossd.errors": "errors"}
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


def python_reference(source, out):
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


# Makes the page of lossctl's commands from what the program says of itself. BIN has lossctl.

COMMAND = re.compile(r"^  (\w[\w-]*) {2,}(\S.*)$", re.MULTILINE)


def output(*command):
    # Every program ends its --help with success or with 1 (Abseil).
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{' '.join(map(str, command))}: status {done.returncode}, {done.stdout}")
    return done.stdout


def commands_page(lossctl):
    help_text = output(lossctl, "--help")
    commands = COMMAND.findall(help_text.split("Subcommands:")[1].split("\n\n")[0])
    if len(commands) < 10:
        raise RuntimeError(f"{lossctl} --help lists no commands")
    parts = ["# Commands of lossctl", "What `lossctl --help` and `lossctl COMMAND --help` say. [lossctl](../docs/lossctl.md) shows how they are used.",
             f"```text\n{help_text.strip()}\n```"]
    for name, _ in commands:
        text = output(lossctl, name, "--help")
        # The end is that of every command.
        parts += [f"## lossctl {name}", f"```text\n{text.split('Exit codes:')[0].strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def program_reference(binaries, out):
    (out / "lossctl.md").write_text(commands_page(binaries / "lossctl"), encoding="utf-8")


if __name__ == "__main__":
    {"protocol": protocol_reference, "python": python_reference, "programs": program_reference}[sys.argv[1]](*map(Path, sys.argv[2:]))
