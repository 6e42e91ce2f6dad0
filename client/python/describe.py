#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes lossd/v1/descriptions.py: a class of Python for each message with which the server describes something.

    describe.py OUT DESCRIPTORS

DESCRIPTORS is what protoc writes with --descriptor_set_out --include_source_info. A class has the message's fields and comments, with
words for enumerations ("adam", "bf16") and tuples for lists; lossd/descriptions.py has what all classes can do.
"""

import re
import sys
import textwrap
from pathlib import Path

from google.protobuf import descriptor_pb2

FIELD = descriptor_pb2.FieldDescriptorProto
MESSAGES, FIELDS = (descriptor_pb2.FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER,
                    descriptor_pb2.DescriptorProto.FIELD_FIELD_NUMBER)

# The messages; those that others have come before them.
MESSAGE_NAMES = (
    "MemoryUsage", "HeadSpec", "HeadState", "SliceLimits", "Choice", "HeadDevice", "Paging", "HeadHistory", "HeadDescription",
    "RankDescription", "ServerDescription", "PeerDescription", "StreamDescription", "ListStreamsResponse", "ApplyStepResponse",
    "RowRange", "AddGradientResponse", "SaveProgress", "SaveCheckpointResponse", "CheckpointInfo")
# Answers of calls have names of their own in Python, and say whose answers they are.
ANSWERS = {"ListStreamsResponse": ("StreamList", "Who sends rows: what Client.list_streams returns."),
           "ApplyStepResponse": ("StepResult", "What Client.apply_step did."),
           "AddGradientResponse": ("AddedGradient", "What Client.add_gradient did."),
           "SaveCheckpointResponse": ("SavedCheckpoint", "What Client.save_checkpoint wrote.")}
BASES = {"MemoryUsage": "ShownMemory", "HeadDescription": "ShownHead", "Choice": "ShownChoice"}  # others: Shown
# Words for what a message leaves unspecified; None for other enumerations.
UNSPECIFIED = {"Norm": "none", "OptimizerState": "adam", "Gradients": "exact", "Logits": "stored", "Split": "any",
               "Residency": "device"}
# What repr() leaves out beside other messages, which it never shows.
HIDDEN = {"HeadSpec": {"class_list"}, "ApplyStepResponse": {"applied_incarnation"}, "CheckpointInfo": {"incarnation", "save_number"},
          "ServerDescription": {"max_message_bytes", "max_streams", "region_socket", "http", "region_device", "collectives",
                                "region_devices", "gpu_sharing"}}
NUMBERS = {FIELD.TYPE_BOOL: ("bool", "False"), FIELD.TYPE_STRING: ("str", '""'), FIELD.TYPE_BYTES: ("bytes", 'b""'),
           FIELD.TYPE_FLOAT: ("float", "0.0"), FIELD.TYPE_DOUBLE: ("float", "0.0")}  # others: int


class Module:
    """The classes of the messages in some .proto files."""

    def __init__(self, files):
        self._messages = {}  # by name: the message and the comments on it and its fields, by their paths
        # Of Python for status codes, values of enumerations and methods of services.
        self._words = {code: code.title().replace("_", "") for code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")}
        for file in files:
            comments = {tuple(each.path): f"{each.leading_comments}\n{each.trailing_comments}"
                        for each in file.source_code_info.location}
            for index, message in enumerate(file.message_type):
                inside = {path[2:]: comment for path, comment in comments.items() if path[:2] == (MESSAGES, index)}
                self._messages[message.name] = message, inside
            for enum in file.enum_type:
                prefix = enum.value[0].name.removesuffix("UNSPECIFIED")
                field = prefix.removesuffix("_").lower()
                self._words.update((value.name, f'{field} "{value.name.removeprefix(prefix).lower()}"') for value in enum.value)
            for method in (method for service in file.service for method in service.method):
                self._words[method.name] = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower()

    def text(self):
        head = ("# SPDX-License-Identifier: Apache-2.0\n"
                '"""What the server says of itself, of heads, steps and checkpoints. Made by describe.py from the .proto files."""')
        imports = ("from __future__ import annotations", "from dataclasses import dataclass, field",
                   "from lossd import types\nfrom lossd.descriptions import Shown, ShownChoice, ShownHead, ShownMemory")
        return "\n\n".join((head, *imports)) + "\n\n\n" + "\n\n\n".join(map(self._class, MESSAGE_NAMES)) + "\n"

    def _class(self, name):
        message, comments = self._messages[name]
        python, says = ANSWERS.get(name, (name, comments.get((), "")))
        lines = ["@dataclass(frozen=True, repr=False)", f"class {python}({BASES.get(name, 'Shown')}):", *self._doc(says), ""]
        for index, each in enumerate(message.field):
            lines.append(f"    {each.name}: {self._declaration(each, name)}")
            lines += self._doc(comments.get((FIELDS, index), ""))
        return "\n".join(lines)

    def _declaration(self, of, message):
        """The annotation of a field, and its default."""
        kind, default = NUMBERS.get(of.type, ("int", "0"))
        named = of.type_name.rpartition(".")[2]
        if of.type == FIELD.TYPE_MESSAGE:
            kind = ANSWERS.get(named, (named,))[0]
        elif of.type == FIELD.TYPE_ENUM:
            word = UNSPECIFIED.get(named)
            kind, default = f"types.{named}{'' if word else ' | None'}", f'"{word}"' if word else "None"
        if of.label == FIELD.LABEL_REPEATED:
            kind, default = f"tuple[{kind}, ...]", "()"
        elif of.type == FIELD.TYPE_MESSAGE:
            return f"{kind} = field(default_factory={kind}, repr=False)"
        elif of.proto3_optional:
            kind, default = f"{kind} | None", "None"
        hidden = of.type == FIELD.TYPE_MESSAGE or of.name in HIDDEN.get(message, ())
        return f"{kind} = field(default={default}, repr=False)" if hidden else f"{kind} = {default}"

    def _doc(self, comment):
        """The lines of a docstring; none if there is no comment. Words of the protocol become those of Python."""
        text = re.sub(r"\w+", lambda word: self._words.get(word[0], word[0]), " ".join(comment.split()))
        if not text:
            return []
        text = text.removesuffix(".") + "."
        if "_" not in text.partition(" ")[0]:  # it is no name
            text = text[0].upper() + text[1:]
        return textwrap.wrap(f'"""{text}"""', 132, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


if __name__ == "__main__":
    out, descriptors = map(Path, sys.argv[1:])
    out.write_text(Module(descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes()).file).text())
