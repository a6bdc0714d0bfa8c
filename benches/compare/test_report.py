"""Tests of tables and plots, without measurements: python3 -m unittest discover --start-directory
benches/compare"""

import unittest
from xml.etree import ElementTree

from report import Bar, Group, Report, between_markers, svg, times

BARS = [Bar("ours", 1.0, "1 µs", True), Bar("theirs <1>", 4.0, "4 µs", False)]
REPORT = Report("Time", "One run.", ["", "µs"], [["ours", "1"], ["theirs", "4"]], [Group("both", BARS)])


class Reports(unittest.TestCase):
    def test_what_is_between_markers_is_replaced_and_nothing_else(self) -> None:
        page = "before\n<!-- scripts/compare: a -->\nold\n<!-- end of a -->\nafter\n"
        once = between_markers(page, "a", "new")
        self.assertEqual(once, page.replace("old", "new"))
        self.assertEqual(between_markers(once, "a", "new"), once)

    def test_a_page_without_markers_is_refused(self) -> None:
        with self.assertRaises(ValueError):
            between_markers("nothing", "a", "new")

    def test_a_table_has_a_line_for_each_row(self) -> None:
        self.assertEqual(
            REPORT.markdown().splitlines(),
            ["One run.", "", "|  | µs |", "| --- | --- |", "| ours | 1 |", "| theirs | 4 |"],
        )

    def test_bars_are_as_long_as_their_values(self) -> None:
        picture = ElementTree.fromstring(svg(REPORT))
        widths = [
            float(rect.attrib["width"])
            for rect in picture.iter("{http://www.w3.org/2000/svg}rect")
            if rect.attrib.get("class") in ("ours", "theirs")
        ]
        self.assertEqual(widths[1], 4 * widths[0])

    def test_ratios_have_two_digits_at_the_least(self) -> None:
        self.assertEqual([times(0.5), times(9.94), times(10.2), times(672)], ["0.5×", "9.9×", "10×", "672×"])


if __name__ == "__main__":
    unittest.main()
