# SPDX-License-Identifier: Apache-2.0
"""Small changes to Python code, as text: the counterpart of mutate.py, with the same two functions.

Places come from the syntax tree, and the text is replaced there. A changed place asks mutant.py which change is in force.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mutate import Mutation, flat

_COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
                ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"),
                ast.NotIn: (r"not\s+in", "in")}
_OPERATORS = {ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "+")}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_ASKS = '__import__("lossd._mutant", None, None, ["on"]).on({})'


@dataclass(frozen=True)
class _Edit:
    begin: int
    end: int
    text: str


class _Source:
    """Text whose places are those of the syntax tree: lines from 1, columns in bytes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def begin(self, node: ast.stmt | ast.expr) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: ast.stmt | ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.stmt | ast.expr) -> str:
        return self.text[self.begin(node):self.end(node)]

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Nothing but a comment shares its lines, so that it can be put into a block."""
        before = self.text[self._starts[statement.lineno - 1]:self.begin(statement)]
        after = self.text[self.end(statement):self._starts[statement.end_lineno or 0]]
        return not before.strip() and re.fullmatch(r"\s*(#.*)?\n?", after) is not None

    def operator(self, left: ast.expr, right: ast.expr, pattern: str, other: str) -> Iterator[_Edit]:
        """The operator between two operands becomes another one."""
        begin = self.end(left)
        between = re.sub(r"#[^\n]*", lambda found: " " * len(found.group()), self.text[begin:self.begin(right)])
        word = rf"\b{pattern}\b" if pattern[0].isalpha() else pattern
        for found in [*re.finditer(word, between)][:1]:
            yield _Edit(begin + found.start(), begin + found.end(), other)


def _operand(source: _Source, node: ast.expr) -> str:
    text = source.of(node)
    return f"({text})" if isinstance(node, (ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr)) or "\n" in text else text


def _negated(source: _Source, test: ast.expr) -> Iterator[_Edit]:
    """A condition whose own operators are not changed otherwise."""
    if not isinstance(test, (ast.BoolOp, ast.Compare, ast.Constant, ast.UnaryOp)):
        yield _Edit(source.begin(test), source.end(test), f"not ({source.of(test)})")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _edits(source: _Source, root: ast.expr) -> Iterator[_Edit]:
    """What can be changed in an expression. The parts of formatted strings have no places of their own before Python 3.12."""
    waiting: list[ast.AST] = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            continue
        waiting.extend(reversed([*ast.iter_child_nodes(node)]))
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right, operator in zip(operands, operands[1:], node.ops):
                yield from source.operator(left, right, *_COMPARISONS[type(operator)])
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:]):
                yield from source.operator(left, right, word, other)
            for dropped in node.values:
                kept = f" {word} ".join(_operand(source, each) for each in node.values if each is not dropped)
                yield _Edit(source.begin(node), source.end(node), kept)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield _Edit(source.begin(node), source.end(node), _operand(source, node.operand))
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node.left) and not _is_text(node.right):
            yield from source.operator(node.left, node.right, *_OPERATORS[type(node.op)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            other = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield _Edit(source.begin(node), source.end(node), other)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            yield _Edit(source.begin(node.func), source.end(node.func), _FUNCTIONS[node.func.id])
        elif isinstance(node, ast.IfExp):
            yield from _negated(source, node.test)
        elif isinstance(node, ast.comprehension):
            for condition in node.ifs:
                yield from _negated(source, condition)


def _roots(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement, without those of the statements in it."""
    found: list[ast.expr | None] = []
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
        found = [statement.value]
    elif isinstance(statement, (ast.If, ast.While)):
        found = [statement.test]
    elif isinstance(statement, ast.For):
        found = [statement.iter]
    elif isinstance(statement, ast.With):
        found = [item.context_expr for item in statement.items]
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        found = [*statement.args.defaults, *statement.args.kw_defaults]
    return [root for root in found if root is not None and not _is_text(root) and
            not any(isinstance(each, (ast.Yield, ast.YieldFrom, ast.Await)) for each in ast.walk(root))]


def _can_go(statement: ast.stmt, function: str) -> bool:
    """Calls, raised errors, and what is stored outside of the function."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.Assign):
        return function != "__init__" and all(isinstance(each, (ast.Attribute, ast.Subscript)) for each in statement.targets)
    return isinstance(statement, (ast.AugAssign, ast.Delete, ast.Raise))


def _statements(body: list[ast.stmt], function: str = "") -> Iterator[tuple[ast.stmt, str]]:
    """All of a block and of the blocks in it, each with the name of its function; not what only type checkers read."""
    for statement in body:
        yield statement, function
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            continue
        inner = statement.name if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []), inner)
        for handler in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from _statements(handler.body, inner)


def _of_expression(source: _Source, statement: ast.stmt, root: ast.expr) -> Iterator[Mutation]:
    begin, end, first = source.begin(root), source.end(root), source.begin(statement)
    last = source.end(statement) if not hasattr(statement, "body") else end
    edits = [*_edits(source, root)]
    if isinstance(statement, (ast.If, ast.While)):
        edits += _negated(source, root)
    if isinstance(statement, ast.Return) and ast.unparse(root) != "None":
        edits.append(_Edit(begin, end, "None"))
    for edit in edits:
        changed = source.text[begin:edit.begin] + edit.text + source.text[edit.end:end]
        try:
            code = ast.unparse(ast.parse(f"({changed}\n)", mode="eval"))
        except SyntaxError:
            continue
        if code != ast.unparse(root):
            after = source.text[first:begin] + changed + source.text[end:last]
            yield Mutation(begin, end, code, False, statement.lineno, flat(source.text[first:last]), flat(after))


def _of_statement(source: _Source, statement: ast.stmt, function: str) -> Iterator[Mutation]:
    if not source.stands_alone(statement):
        return
    begin, end = source.begin(statement), source.end(statement)
    edits = [_Edit(begin, end, "pass")] if _can_go(statement, function) else []
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _OPERATORS and not _is_text(statement.value):
        edits += source.operator(statement.target, statement.value, *_OPERATORS[type(statement.op)])
    for edit in edits:
        changed = source.text[begin:edit.begin] + edit.text + source.text[edit.end:end]
        code = ast.unparse(ast.parse(changed))
        yield Mutation(begin, end, code, True, statement.lineno, flat(source.of(statement)), flat(changed))


def mutations(text: str) -> list[Mutation]:
    """All that can be made in a file."""
    source, found = _Source(text), []
    for statement, function in _statements(ast.parse(text).body):
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            continue
        for root in _roots(statement):
            found += _of_expression(source, statement, root)
        found += _of_statement(source, statement, function)
    return [*dict.fromkeys(found)]


def switched(text: str, chosen: list[tuple[int, Mutation]]) -> str:
    """The file with these changes, each in force if its number is. At most one change of a line."""
    for number, each in sorted(chosen, key=lambda pair: -pair[1].begin):
        original, asks = text[each.begin:each.end], _ASKS.format(number)
        if each.statement:
            indent = " " * (each.begin - text.rfind("\n", 0, each.begin) - 1)
            kept = f"if {asks}: {each.changed}\n{indent}else: {original}"
        else:
            kept = f"(({each.changed}) if {asks} else ({original}))"
        text = text[:each.begin] + kept + text[each.end:]
    return text
