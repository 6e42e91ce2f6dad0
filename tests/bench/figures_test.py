# SPDX-License-Identifier: Apache-2.0
"""docs/figures has the figures that bench/figures.py makes, drawn from the files that are in bench/results now."""

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import figures  # noqa: E402


class Figures(unittest.TestCase):
    def test_every_figure_in_the_tree_is_one_that_the_script_makes(self):
        found = {path.relative_to(figures.FOLDER).as_posix() if path.is_relative_to(figures.FOLDER) else str(path)
                 for folder in ("docs", "bench") for path in (ROOT / folder).rglob("*.svg")}
        drawn_by_hand = {str(ROOT / "docs" / "overview.svg")}
        self.assertEqual(found - drawn_by_hand, set(figures.FIGURES))

    def test_each_figure_is_of_the_files_that_are_there(self):
        for name, (files, _) in figures.FIGURES.items():
            text = (figures.FOLDER / name).read_text(encoding="utf-8")
            self.assertEqual(re.findall(r"<dc:identifier>(.*?)</dc:identifier>", text), [figures.digest(files)],
                             f"{name} is not of {', '.join(files)} as they are: make figures")

    def test_figures_hold_nothing_that_differs_from_run_to_run(self):
        for name in figures.FIGURES:
            self.assertNotIn("<dc:date>", (figures.FOLDER / name).read_text(encoding="utf-8"), name)

    def test_curves_are_columns(self):
        path = ROOT / "bench" / "results" / "h200" / "loss_curves.csv"
        curves = figures.curves(path)
        self.assertEqual(list(curves), ["local", "lossd"])
        self.assertEqual({len(values) for values in curves.values()}, {500})


if __name__ == "__main__":
    unittest.main()
