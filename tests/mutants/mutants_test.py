# SPDX-License-Identifier: Apache-2.0
"""mutants.py: that changes are code, at the lines they say, and in force when they are switched on; entries of ctest; results."""

import ast
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

import runner
import mutants
import mutate
import mutate_python
import tree

CPP = """\
int Sum(int first, int last) {
  int sum = 0;
  while (first <= last) {
    if (first != 3 &&
        !(first > 5)) {
      sum += first;  // text of a comment: 7 + 7
    }
    ++first;
  }
  return sum * 2;
}
"""
PYTHON = '''\
"""Adds numbers up to 12."""
LIMIT = 12


def total(first: int, last: int = 4, *, twice: bool = False) -> list[int]:
    found: list[int] = []
    for number in range(first, last + 1):
        if number in (3, 5) or (not twice
                                and number > LIMIT):  # a comment
            continue
        found.append(number)
        found[-1] += 1
    kept = [each if each != 8 else 0 for each in found if each]
    text = f"{first + last} numbers, {'ä' * 2}"
    with open("/dev/null") as nothing:
        nothing.read()
    return kept[:max(len(text), 1)]
'''


def applied(text, mutation):
    return text[:mutation.begin] + mutation.changed + text[mutation.end:]


def by_line(found):
    """Lists of changes of which no two are at the same line, and which have all of them."""
    rounds = []
    for each in found:
        free = next((chosen for chosen in rounds if all(other.line != each.line for other in chosen)), None)
        if free is None:
            rounds.append(free := [])
        free.append(each)
    return rounds


class Changes(unittest.TestCase):
    def check(self, text, found):
        self.assertEqual(len(found), len(set(found)))
        lines = text.splitlines()
        for each in found:
            self.assertNotEqual(each.before, each.after)
            self.assertEqual(lines[each.line - 1].split()[0], each.before.split()[0], each)
            self.assertNotEqual(applied(text, each), text)

    def test_cpp(self):
        found = mutate.mutations(CPP)
        self.check(CPP, found)
        self.assertEqual({each.line for each in found}, {2, 3, 4, 6, 8, 10})
        afters = {each.after for each in found}
        self.assertLessEqual({"int sum = 1;", "while (first < last)", "if (first == 3 && !(first > 5))",
                              "if (first != 3 && (first > 5))", "sum -= first;", "--first;", "return sum + 2;"}, afters)

    def test_python(self):
        found = mutate_python.mutations(PYTHON)
        self.check(PYTHON, found)
        afters = {each.after for each in found}
        self.assertLessEqual({"LIMIT = 13", "for number in range(first, last - 1)", "pass", "found[-1] -= 1", "return None",
                              "return kept[:min(len(text), 1)]", "kept = [each if each == 8 else 0 for each in found if each]",
                              "kept = [each if each != 8 else 0 for each in found if not (each)]"}, afters)
        for begin in ("if number not in (3, 5) or (not twice", "if number in (3, 5) and (not twice", "if number in (3, 6) or (not",
                      "if number in (3, 5) or (twice", "if number in (3, 5) or (not twice or", "if number in (3, 5)"):
            self.assertTrue(any(after.startswith(begin) for after in afters), begin)
        self.assertFalse([each for each in found if "first - last" in each.after], "in a formatted string")

    def test_sources(self):
        for folder in mutants.FOLDERS:
            for file in mutants.sources(folder)[::6]:
                text, found = (tree.HOME / file).read_text(encoding="utf-8"), tree.mutations(file)
                self.check(text, found)
                if file.endswith(".py") and found:
                    compile(mutate_python.switched(text, [*enumerate(by_line(found)[0], 1)]), file, "exec")
                for each in found if file.endswith(".cc") else []:
                    self.assertEqual(each.changed.count("("), each.changed.count(")"), each)


class Switches(unittest.TestCase):
    def run_python(self, text, active=0):
        switch = types.SimpleNamespace(on=lambda number: number == active)
        names = {}
        with mock.patch("builtins.__import__", lambda *arguments: switch):
            try:
                exec(compile(text, "total", "exec"), names)
                return [names["total"](1), names["total"](2, 14), names["total"](8, 14, twice=True), names["total"](-1, 7)]
            except (AttributeError, IndexError, TypeError) as error:
                return type(error)

    def test_python(self):
        """A change that is switched on does what the changed text does; off, what the text does."""
        expected = self.run_python(PYTHON)
        for chosen in by_line(mutate_python.mutations(PYTHON)):
            text = mutate_python.switched(PYTHON, [*enumerate(chosen, 1)])
            self.assertEqual(self.run_python(text), expected)
            for number, each in enumerate(chosen, 1):
                self.assertEqual(self.run_python(text, number), self.run_python(applied(PYTHON, each)), each)
                self.assertNotEqual(ast.dump(ast.parse(applied(PYTHON, each))), ast.dump(ast.parse(PYTHON)), each)

    @unittest.skipUnless(shutil.which("c++"), "no C++ compiler")
    def test_cpp(self):
        """The same, of a program with every change: each round of changes in a namespace of its own."""
        rounds, number, code, expected = by_line(mutate.mutations(CPP)), 0, "", {}
        for index, chosen in enumerate(rounds):
            numbered = [(number + i, each) for i, each in enumerate(chosen, 1)]
            number += len(chosen)
            switched = mutate.switched(CPP, numbered)
            self.assertEqual(switched.count("\n"), CPP.count("\n"))
            code += f"namespace round{index} {{\n{switched}}}\n"
            expected.update({each: other for each, other in numbered})
        sums = ", ".join(f"round{index}::Sum(1, 4)" for index in range(len(rounds)))
        code = f'#include "{tree.HOME}/tests/mutants/mutant.h"\n#include <cstdio>\n{code}' + \
            f"int main() {{\n  const int sums[] = {{{sums}}};\n  for (int sum : sums) std::printf(\"%d \", sum);\n}}\n"
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/program"
            subprocess.run(["c++", "-std=c++17", "-x", "c++", "-", "-o", program], input=code, text=True, check=True)
            record = pathlib.Path(folder, "reached")
            record.write_bytes(bytes(number + 1))
            for active, change in {0: None, **{n: each for n, each in expected.items() if each.line in (2, 6, 10)}}.items():
                done = subprocess.run([program], env={**os.environ, "LOSSD_MUTANT": str(active), "LOSSD_MUTANT_REACHED": str(record)},
                                      capture_output=True, text=True, check=True)
                self.assertEqual(sum(each != "14" for each in done.stdout.split()), 0 if change is None else 1, change)
            self.assertEqual(record.read_bytes(), b"\0" + b"\1" * number)


def told(name, command, **properties):
    return {"name": name, "command": command, "properties": [{"name": key, "value": value} for key, value in
                                                             {"WORKING_DIRECTORY": "/b/tests/client/python", **properties}.items()]}


class Entries(unittest.TestCase):
    TOLD = (
        told("ledger_test", ["/b/bin/engine_tests", "--source=ledger_test"], ENVIRONMENT=["A=b=c"]),
        told("long_test", ["/b/bin/engine_tests", "--source=long_test"], LABELS=["nightly"]),
        told("gpu_test", ["/b/bin/engine_tests", "--source=gpu_test"], LABELS=["gpu"]),
        told("venv", ["prepare.sh", "/b/venv"], FIXTURES_SETUP=["python_package"]),
        told("python_test", ["run.sh", "/b/bin/lossd", "test_a.py", "test_b.py"], FIXTURES_REQUIRED=["python_package"],
             SKIP_RETURN_CODE=77),
        {"name": "not_built_test", "properties": []})
    NINJA = "bin/engine_tests: LINK\nbin/lossd: LINK\nbin/lossctl: LINK\nall: phony\n"
    GROUPS = ("engine_tests", "tests/client/python")

    def setUp(self):
        for target, value in (("runner._told", lambda build: self.TOLD),
                              ("runner.subprocess.run", lambda *_, **__: types.SimpleNamespace(stdout=self.NINJA))):
            patch = mock.patch(target, value)
            patch.start()
            self.addCleanup(patch.stop)

    def test_suites_and_groups(self):
        build = pathlib.Path("/b")
        found = runner.of(build, self.GROUPS, runner.SUITES["all"])
        self.assertEqual([(test.name, test.suite) for test in found], [
            ("ledger_test", runner.TEST), ("long_test", runner.NIGHTLY), ("python_test (test_a.py)", runner.TEST),
            ("python_test (test_b.py)", runner.TEST)])
        self.assertEqual((found[0].environment, found[0].group), ({"A": "b=c"}, "engine_tests"))
        self.assertEqual((found[3].command, found[3].skipped), (("run.sh", "/b/bin/lossd", "test_b.py"), 77))
        self.assertEqual([test.name for test in runner.of(build, ("engine_tests",), runner.SUITES["nightly"])], ["long_test"])
        self.assertEqual([test.name for test in runner.fixtures(build, found)], ["venv"])

    def test_targets(self):
        self.assertEqual(runner.targets(pathlib.Path("/b"), self.GROUPS), ["bin/engine_tests", "bin/lossctl", "bin/lossd"])
        self.assertEqual(runner.targets(pathlib.Path("/b"), ["engine_tests"]), ["bin/engine_tests"])


class Results(unittest.TestCase):
    def test_summary(self):
        results = {"server/rpc/a.cc | a | b": f"noticed by {runner.TEST}: rpc_a_test", "server/rpc/a.cc | c | d": "survived: no test",
                   "server/rpc/a.cc | e | f": f"noticed by {runner.NIGHTLY}: faults_test", "server/rpc/b.cc | a | b": "survived: x, y",
                   "client/cpp/b.cc | a | b": "survived: x"}
        lines, survived = mutants.summary(["server/rpc"], results, {"server/rpc/b.cc | a | b": "why"})
        self.assertEqual(lines, ["server/rpc: 1 noticed by make test, 1 more by the nightly suite, 1 survived, "
                                 "1 equivalent or of no matter",
                                 "of 3 that matter, make test noticed 1, and the nightly suite 1 more"])
        self.assertEqual(survived, 1)

    def test_errors_of_a_unity_build(self):
        """The first error in each changed file is blamed on the change there, or else on the one before."""
        made = [tree.Mutant(number, "server", file, mutate.Mutation(0, 1, "", False, line, "", ""))
                for number, (file, line) in enumerate([("server/a.cc", 3), ("server/a.cc", 9), ("server/b.cc", 3)])]
        output = (f"In file included from {tree.TREE}/server/a.cc:1,\n                 from /x/unity_0_cxx.cxx:4:\n"
                  f"{tree.TREE}/server/a.cc.mutants:5:9: error: no\n{tree.TREE}/server/a.cc.mutants:9:9: error: no\n"
                  f"{tree.TREE}/server/b.cc.mutants:3:1: note: here\n")
        self.assertEqual(tree.wrong(made, output), {made[0]})


if __name__ == "__main__":
    sys.exit(unittest.main())
