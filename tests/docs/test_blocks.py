"""Extraction, comparison and rewriting of blocks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import check
from blocks import BlockError, blocks, matches
from commands import ports_of, runnable
from links import anchor, broken


class Extraction(unittest.TestCase):
    def test_blocks_have_language_line_and_text(self) -> None:
        (first, second) = blocks("a\n```sh\nls\n\npwd\n```\n\n- b\n\n  ```rust,ignore\n  x\n    y\n  ```\n")
        self.assertEqual((first.language, first.line, first.text), ("sh", 2, "ls\n\npwd\n"))
        self.assertEqual((second.language, second.attributes, second.text), ("rust", ",ignore", "x\n  y\n"))

    def test_longer_fences_contain_shorter_ones(self) -> None:
        (block,) = blocks("````text\n```sh\nls\n```\n````\n")
        self.assertEqual(block.text, "```sh\nls\n```\n")

    def test_comments_belong_to_the_next_block_only(self) -> None:
        first, second, third = blocks(
            "<!-- not run: needs a GPU -->\n\n```sh\nls\n```\n<!-- file: a.json -->\n```json\n```\n```\n```\n"
        )
        self.assertEqual((first.not_run, first.file), ("needs a GPU", None))
        self.assertEqual((second.not_run, second.file), (None, "a.json"))
        self.assertEqual((third.file, third.is_output), (None, False))

    def test_sizes_can_be_smaller(self) -> None:
        (block,) = blocks("<!-- smaller: 6000 by 20 -->\n```sh\nx 6000\n```\n")
        self.assertEqual(block.smaller, ("6000", "20"))
        for comment in ("6000", "7000 by 20"):
            with self.assertRaisesRegex(BlockError, "line 2: .*smaller"):
                blocks(f"<!-- smaller: {comment} -->\n```sh\nx 6000\n```\n")

    def test_a_reason_is_needed(self) -> None:
        with self.assertRaisesRegex(BlockError, "line 1: .* needs a value"):
            blocks("<!-- not run: -->\n```sh\n```\n")

    def test_comments_without_a_block_are_errors(self) -> None:
        with self.assertRaisesRegex(BlockError, "line 2"):
            blocks("<!-- output -->\ntext\n```sh\n```\n")
        with self.assertRaisesRegex(BlockError, "at the end"):
            blocks("<!-- output -->\n")

    def test_fences_too_many_are_errors(self) -> None:
        for text in ("```sh\nls\n```\n```\n<!-- output -->\n```\n", "```\nx\n```sh\nls\n```\n"):
            with self.assertRaisesRegex(BlockError, "one too many"):
                blocks(text)

    def test_open_fences_are_errors(self) -> None:
        with self.assertRaisesRegex(BlockError, "line 1: .* not closed"):
            blocks("```sh\nls\n")


class Comparison(unittest.TestCase):
    def test_wildcards_stand_for_text_and_lines(self) -> None:
        output = "one\ntwo 2.5 s\nthree\nfour\n"
        self.assertTrue(matches(output, output))
        self.assertTrue(matches("one\ntwo ... s\n...\nfour\n", output))
        self.assertTrue(matches("...\nfour\n...\n", output))
        self.assertFalse(matches("one\n", output))
        self.assertFalse(matches("one\ntwo 2.6 s\n...\n", output))
        self.assertFalse(matches("o.e\n...\n", output))


class Rewriting(unittest.TestCase):
    def test_servers_are_waited_for_and_other_commands_stay_in_the_background(self) -> None:
        text = "terrace node --listen 127.0.0.1:7451 \\\n    --memory 1GiB &\nterrace features produce &\nsleep 1 &\n"
        self.assertEqual(
            runnable(text, {7451: 9000}),
            "terrace node --listen 127.0.0.1:9000 \\\n    --memory 1GiB\nterrace features produce &\nsleep 1 &\n",
        )

    def test_cargo_run_is_the_program(self) -> None:
        self.assertEqual(runnable("cargo run --release -- serve      # a server\n", {}), "terrace serve      # a server\n")

    def test_ports_are_replaced_where_they_are_ports(self) -> None:
        text = "for port in 8001 8002; do\ncurl localhost:$port --requests 8001\ndone\ncurl 127.0.0.1:8001/x\n"
        self.assertEqual(ports_of([text]), [8000, 8001, 8080])
        changed = runnable(text, {8001: 1111, 8002: 2222})
        self.assertEqual(changed, text.replace("8001 8002", "1111 2222").replace(":8001", ":1111"))


    def test_ports_are_free_different_and_in_order(self) -> None:
        first, second = check.free_ports([8001, 8000]), check.free_ports([8000])
        self.assertLess(first[8000], first[8001])
        self.assertFalse(set(first.values()) & set(second.values()))


class Links(unittest.TestCase):
    def test_links_lead_to_files_and_headings(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "b.md").write_text("# Two words, `code`!\n```sh\n# no heading\n```\n")
            document = Path(name) / "a.md"
            document.write_text("[x](b.md) [x](b.md#two-words-code) [x](#here) `[x](no.md)`\n# Here\n[x](c.md) [x](b.md#no-heading)\n")
            self.assertEqual(broken(document), ["c.md", "b.md#no-heading"])
        self.assertEqual(anchor("Run a [node](x.md): how"), "run-a-node-how")


class Documents(unittest.TestCase):
    """Whole documents, with a program that takes the place of the real one."""

    PROGRAM = """#!/usr/bin/env python3
import http.server, os, sys
if sys.argv[1] == "serve":
    port = int(os.environ["TERRACE_LISTEN"].rpartition(":")[2])
    print("open", port, flush=True)
    http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
if sys.argv[1] == "config":
    sys.exit("wrong" in open(sys.argv[2]).read())
print(*sys.argv[1:])
"""

    def results(self, text: str, doc_tests: str = "") -> check.Result:
        with tempfile.TemporaryDirectory() as name:
            sources = Path(name) / "tests/src"
            sources.mkdir(parents=True)
            (sources / "lib.rs").write_text(doc_tests)
            program, document = Path(name) / "program", Path(name) / "a.md"
            program.write_text(self.PROGRAM)
            program.chmod(0o755)
            document.write_text(text)
            before, check.REPOSITORY = check.REPOSITORY, Path(name)
            try:
                return check.check(document, program, has_package=False)
            finally:
                check.REPOSITORY = before

    def test_commands_run_in_one_shell_and_output_is_compared(self) -> None:
        text = "```sh\nx=3\n```\n```sh\nterrace keys $x\n```\n<!-- output -->\n```\nkeys {}\n```\n"
        right, wrong = self.results(text.format(3)), self.results(text.format(4))
        self.assertEqual((right.failures, right.checked), ([], 3))
        self.assertIn("a.md:8: the document says", wrong.failures[0])

    def test_smaller_sizes_run(self) -> None:
        text = "<!-- smaller: 6000 by 20 -->\n```sh\nterrace trace 6000\n```\n<!-- output -->\n```\ntrace 20\n```\n"
        self.assertEqual(self.results(text).failures, [])

    def test_a_failing_command_fails_the_document(self) -> None:
        result = self.results("```sh\nfalse\ntrue\n```\n")
        self.assertIn("a.md:1: a command failed", result.failures[0])

    def test_servers_answer_the_next_command_and_are_ended(self) -> None:
        pid = "```sh\nterrace serve\necho $(ls .docs | grep pid) > pid\ncat pid\ncurl -s -o /dev/null http://127.0.0.1:8000/\n```\n"
        result = self.results(f"{pid}<!-- output -->\n```\nopen ...\n...\n```\n")
        self.assertEqual(result.failures, [])
        state = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        self.assertNotIn(f"{os.sep}program serve", state)

    def test_settings_json_and_python_are_checked(self) -> None:
        self.assertEqual(self.results("```toml\na = 1\n```\n```json\n{}\n{}\n```\n```python\nawait x\n```\n").failures, [])
        for wrong in ("toml\na = 'wrong'", "toml\na", "json\n{", "python\nx ="):
            self.assertEqual(len(self.results(f"```{wrong}\n```\n").failures), 1, wrong)

    def test_what_does_not_run_has_a_reason(self) -> None:
        result = self.results("<!-- not run: needs a GPU -->\n```sh\nfalse\n```\n")
        self.assertEqual((result.failures, result.not_run), ([], ["a.md:2: needs a GPU"]))

    def test_rust_needs_a_doc_test(self) -> None:
        example = "```rust\nlet x = 1;\n```\n"
        self.assertIn("no doc test", self.results(example).failures[0])
        tests = 'include_str!("../../a.md")'
        self.assertEqual(self.results(example, tests).failures, [])
        self.assertIn("ignores", self.results(example.replace("rust", "rust,ignore"), tests).failures[0])


if __name__ == "__main__":
    sys.exit(unittest.main())
