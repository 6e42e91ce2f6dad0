#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes lossd/v1/library.py: the structs and functions of liblossd.so for ctypes, as its headers declare them.

    bind.py OUT HEADER...

The headers are client/library/lossd_client.h and server/app/lossd.h. Their declarations use few forms of C, and what is none of these
is refused.
"""

import re
import sys
from pathlib import Path

NUMBERS = {"int": "c_int", "int32_t": "c_int32", "uint32_t": "c_uint32", "int64_t": "c_int64", "uint64_t": "c_uint64",
           "size_t": "c_size_t", "float": "c_float", "double": "c_double", "enum lossd_state": "c_int"}
TEXTS = {"const char*": "c_char_p", "const char*const*": "POINTER(c_char_p)", "char*": "c_void_p", "char**": "POINTER(c_void_p)"}


def kind_of(declared, structs):
    """The type of ctypes for one of C: memory is an address, a struct of the header a pointer to it."""
    declared = declared.strip().replace(" const*", "const*")
    if declared in NUMBERS or declared in TEXTS:
        return {**NUMBERS, **TEXTS}[declared]
    pointed = re.fullmatch(r"(?:const )?(\w+)\*", declared)
    if pointed and (pointed[1] in structs or pointed[1] in ("int", "size_t", "uint64_t")):
        return f"POINTER({NUMBERS.get(pointed[1], pointed[1])})"
    if pointed and re.fullmatch(r"void|float|int32_t|lossd_\w+", pointed[1]):
        return "c_void_p"
    raise SystemExit(f"bind.py: the type {declared!r} is none that it knows")


def split(declaration):
    """Type and name."""
    kind, name = re.fullmatch(r"(.*?)(\w+)", declaration.strip(), re.DOTALL).groups()
    return " ".join(kind.split()), name


def module(header):
    code = re.sub(r"/\*.*?\*/|//[^\n]*|#[^\n]*", "", header, flags=re.DOTALL)
    parts = ["# SPDX-License-Identifier: Apache-2.0",
             '"""The structs and functions of liblossd.so. Made by bind.py from its headers."""', "\nfrom ctypes import *"]
    structs = []
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\}", code, re.DOTALL):
        fields = ",".join(f'\n        ("{field}", {kind_of(kind, structs)})' for kind, field in map(split, body.split(";")[:-1]))
        parts.append(f"\n\nclass {name}(Structure):\n    _fields_ = [{fields}]")
        structs.append(name)
    parts.append("\n\nFUNCTIONS = {  # what each returns, and what it takes")
    for answer, name, taken in re.findall(r"^([\w ]+\**) ?(lossd_\w+)\((.*?)\);", code, re.DOTALL | re.MULTILINE):
        kinds = [] if taken in ("", "void") else [kind_of(split(each)[0], structs) for each in taken.split(",")]
        returned = "None" if answer.strip() == "void" else kind_of(answer, ())
        parts.append(f'    "{name}": ({returned}, [{", ".join(kinds)}]),')
    return "\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    out, *headers = map(Path, sys.argv[1:])
    out.write_text(module("\n".join(header.read_text() for header in headers)))
