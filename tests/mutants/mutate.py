# SPDX-License-Identifier: Apache-2.0
"""Small changes to C++ code, as text: where they can be made, and a file in which they can be switched on one by one.

It knows statements that begin on a line of their own, as clang-format leaves them, and no more of the language; what
does not compile with its changes loses them (mutants.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == "}
_OTHERS = {" && ": " || ", " || ": " && ", " + ": " - ", " - ": " + ", " += ": " -= ", " -= ": " += ", " * ": " + ",
           "++": "--", "--": "++", "true": "false", "false": "true", "std::min": "std::max", "std::max": "std::min"}
_TOKENS = re.compile("|".join(
    [re.escape(token) for token in {**_COMPARISONS, **_OTHERS} if not token[0].isalpha()] +
    [rf"\b(?:{'|'.join(token for token in _OTHERS if token[0].isalpha())})\b", r"(?<![\w.])\d+(?![\w.])", r"!(?=[\w(])", r"(?<![\w.>:])\w+(?:\.|->)ok\(\)"]))
_CALL = re.compile(r"[\w:.\->()\[\]*]+\(.*\)", re.DOTALL)
_DECLARATION = re.compile(r"(?:const |static )*(?:auto|bool|double|float|int|size_t|u?int\d+_t|[\w:]+(?:<[\w:, *]+>)?)"
                          r"(?: const)?[&*]? (?:const )?\w+ = ")


@dataclass(frozen=True)
class Mutation:
    begin: int  # of the changed expression or statement in the file
    end: int
    changed: str
    statement: bool  # of a whole statement, with its semicolon
    line: int
    before: str  # the statement, for people and as a key: without line breaks
    after: str


def _blank(text: str) -> str:
    """The code with spaces for comments and for what strings hold: same length, same lines."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
    # Of literals the quotes stay, of comments nothing.
    return pattern.sub(lambda found: re.sub(r"[^\n]" if found.group()[0] == "/" else r"[^\n\"']", " ", found.group()), text)


def _statements(code: str) -> Iterator[tuple[int, int]]:
    """Where statements begin, and end with a semicolon or before the brace of a block."""
    at, open_ended = 0, False
    for line in code.splitlines(keepends=True):
        stripped = line.strip()
        begin = at + len(line) - len(line.lstrip())
        at += len(line)
        if not stripped or stripped[0] in "#}" or open_ended:
            open_ended = bool(stripped) and (open_ended or stripped[0] != "#") and stripped[-1] not in ";{}:"
            continue
        end = _end(code, begin)
        if end > 0:
            yield begin, end
        open_ended = stripped[-1] not in ";{}:"


def _end(code: str, begin: int) -> int:
    """Just after the first semicolon outside of parentheses, or before a brace there; 0 if neither comes."""
    depth = 0
    for at in range(begin, min(len(code), begin + 600)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(code[at], 0)
        if depth < 0:
            return 0
        if depth == 0 and code[at] in ";{":
            return at + 1 if code[at] == ";" else at
    return 0


def _expression(code: str, begin: int, end: int) -> tuple[int, int, bool] | None:
    """The part of a statement that is changed, and whether it is the statement itself."""
    text = code[begin:end]
    if any(each in text for each in ("{", "[&", "[this", "[=", "[self", "assert", "template", "operator", "using ", "case ")):
        return None
    if found := re.match(r"(?:\} )?(?:else )?(?:if|while) \(", text):
        first = begin + found.end()
        depth, last = 1, first
        while last < end and depth > 0:
            depth += {"(": 1, ")": -1}.get(code[last], 0)
            last += 1
        inside = code[first:last - 1]
        return None if ";" in inside or re.search(r"[^=!<>]=[^=]", inside) else (first, last - 1, False)
    if not text.endswith(";") or re.match(r"(for|else|do|goto|break|continue|delete|struct|class|enum|public|private)\b", text):
        return None
    if re.match(r"(?:static |inline )*constexpr\b", text):  # a switch is not constant
        return None
    if found := re.match(r"return ", text):
        return begin + found.end(), end - 1, False
    if found := _DECLARATION.match(text):
        return begin + found.end(), end - 1, False
    if re.match(r"[\w:<>,*& ]+ \w+(?:\(.*\))?(?: const)?(?: override)?;$", text, re.DOTALL):  # a declaration
        return None
    return begin, end, True


def _changes(text: str) -> Iterator[str]:
    """What the text may be changed to."""
    for found in _TOKENS.finditer(text):
        token = found.group()
        other = {**_COMPARISONS, **_OTHERS}.get(token)
        if token == "!":
            other = ""
        elif token.endswith("ok()"):
            other = "true"
        elif token.isdigit():
            other = str(int(token) + 1)
        if other is not None:
            yield text[:found.start()] + other + text[found.end():]
    for found in re.finditer(r" (?:&&|\|\|) ", text):  # a term dropped, if nothing else is around it
        if "(" not in text[found.end():] or text.count("(") == text.count(")"):
            if _balanced(text[:found.start()]):
                yield text[:found.start()]
            if _balanced(text[found.end():]):
                yield text[found.end():]


def _balanced(text: str) -> bool:
    depth = 0
    for each in text:
        depth += {"(": 1, ")": -1}.get(each, 0)
        if depth < 0:
            return False
    return depth == 0


def mutations(text: str) -> list[Mutation]:
    """All that can be made in a file."""
    code, found = _blank(text), []
    for begin, end in _statements(code):
        part = _expression(code, begin, end)
        if part is None:
            continue
        first, last, whole = part
        # Changes are looked for in the blanked text, and made in the real one: both have the same places.
        for changed in dict.fromkeys(_changes(code[first:last])):
            found.append(_mutation(text, code, (begin, end), (first, last, whole), changed))
        if whole and _CALL.fullmatch(code[first:last - 1]) and " = " not in code[first:last]:
            found.append(_mutation(text, code, (begin, end), (first, last, whole), ";"))
    return found


def _mutation(text: str, code: str, statement: tuple[int, int], part: tuple[int, int, bool], changed: str) -> Mutation:
    (begin, end), (first, last, whole) = statement, part
    changed = changed if '"' not in changed else _with_strings(text[first:last], code[first:last], changed)
    line = text.count("\n", 0, begin) + 1
    after = text[begin:first] + changed + text[last:end]
    return Mutation(first, last, changed, whole, line, flat(text[begin:end]), flat(after))


def _with_strings(real: str, blanked: str, changed: str) -> str:
    """The changed text with what its strings hold: the common beginning and end of both are the real text's."""
    head = 0
    while head < min(len(blanked), len(changed)) and blanked[head] == changed[head]:
        head += 1
    tail = 0
    while tail < min(len(blanked), len(changed)) - head and blanked[-1 - tail] == changed[-1 - tail]:
        tail += 1
    return real[:head] + changed[head:len(changed) - tail] + (real[len(real) - tail:] if tail else "")


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def switched(text: str, chosen: list[tuple[int, Mutation]]) -> str:
    """The file with these changes, each in force if its number is; the lines stay where they are."""
    for number, each in sorted(chosen, key=lambda pair: -pair[1].begin):
        original, changed = text[each.begin:each.end], flat(each.changed)
        on = f"::lossd_mutants::On({number})"
        kept = original if "\n" not in original else flat(original) + "\n" * original.count("\n")
        if each.statement:
            kept = f"{{ if ({on}) {{ {changed} }} else {{ {kept} }} }}"
        else:
            kept = f"({on} ? ({changed}) : ({kept}))"
        text = text[:each.begin] + kept + text[each.end:]
    return text
