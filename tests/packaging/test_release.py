"""The scripts that releases are made with, as far as they need no long builds, and the workflows that call them."""

import csv
import hashlib
import base64
import io
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import unittest
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "packaging"))
import notices  # noqa: E402
import wheel  # noqa: E402

CHANGELOG = """# Changelog

## Unreleased

## {version} (2026-12-01)

### Fixes
- Something works.

## 0.0.9

- Something else.
"""


def run(*command: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | environment
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


class Scratch(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)


class Changelog(Scratch):
    def setUp(self) -> None:
        super().setUp()
        manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
        self.version = manifest["workspace"]["package"]["version"]
        self.file = self.folder / "CHANGELOG.md"
        self.file.write_text(CHANGELOG.format(version=self.version))

    def test_the_section_of_a_version_is_the_text_of_its_release(self) -> None:
        told = run("scripts/release/changelog", self.version, CHANGELOG=str(self.file))
        self.assertEqual(told.stdout, "### Fixes\n- Something works.\n")

    def test_a_version_without_changes_is_refused(self) -> None:
        for version in ("Unreleased", "0.0"):
            told = run("scripts/release/changelog", version, CHANGELOG=str(self.file))
            self.assertEqual((told.returncode, told.stdout), (1, ""))

    def test_a_tag_is_the_version_of_all_crates(self) -> None:
        told = run("scripts/release/check", f"v{self.version}", CHANGELOG=str(self.file))
        self.assertEqual((told.returncode, told.stdout), (0, f"{self.version}\n"), told.stderr)
        for tag in ("v0.0.9", self.version, f"v{self.version}0"):
            self.assertNotEqual(run("scripts/release/check", tag, CHANGELOG=str(self.file)).returncode, 0, tag)


class Crates(unittest.TestCase):
    def test_every_crate_comes_after_those_that_it_needs(self) -> None:
        told = run("scripts/release/crates", "--order")
        names = [line.split()[0] for line in told.stdout.splitlines()]
        published = {}
        for member in tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["members"]:
            manifest = tomllib.loads((ROOT / member / "Cargo.toml").read_text())
            if manifest["package"].get("publish") is not False:
                published[manifest["package"]["name"]] = manifest
        self.assertEqual(sorted(names), sorted(published), told.stderr)
        for place, name in enumerate(names):
            needs = published.keys() & published[name].get("dependencies", {}).keys()
            self.assertLessEqual(needs, set(names[:place]), name)

    def published(self, answer: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Runs the script with a registry that has the first crate, and answers the first try of each other with `answer`."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            programs = {
                "cargo": f"""#!/bin/sh
                    case "$1" in
                        info) [ "$3" = "$FIRST" ] ;;
                        publish)
                            echo "$4" >> {folder}/log
                            [ "$(grep -cx "$4" {folder}/log)" = 1 ] || exit 0
                            {answer} ;;
                        *) exec {shutil.which("cargo")} "$@" ;;
                    esac
                """,
                "sleep": f"#!/bin/sh\necho sleep $1 >> {folder}/log\n",
            }
            for program, text in programs.items():
                (folder / program).write_text(text)
                (folder / program).chmod(0o755)
            first = run("scripts/release/crates", "--order").stdout.splitlines()[0].replace(" ", "@")
            path = f"{folder}{os.pathsep}{os.environ['PATH']}"
            told = run("scripts/release/crates", PATH=path, FIRST=first, CARGO_REGISTRY_TOKEN="none")
            log = folder / "log"
            return told, log.read_text().splitlines() if log.exists() else []

    def test_crates_that_are_there_are_skipped_and_waits_are_kept(self) -> None:
        told, log = self.published('echo "error: 429 Too Many Requests" >&2; exit 1')
        names = [line.split()[0] for line in run("scripts/release/crates", "--order").stdout.splitlines()]
        self.assertEqual(told.returncode, 0, told.stderr)
        self.assertEqual(log, [line for name in names[1:] for line in (name, "sleep 600", name)])
        self.assertIn(f"{names[0]} ", told.stdout.splitlines()[0])

    def test_another_failure_ends_the_release(self) -> None:
        told, log = self.published('echo "error: no such token" >&2; exit 1')
        self.assertEqual((told.returncode, len(log)), (1, 1))
        self.assertIn("no such token", told.stderr)

    def test_registries_show_where_crates_come_from(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name)
            members = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["members"]
            for file in ["Cargo.toml", "python/pyproject.toml", "scripts/release/set-repository"]:
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, copy / file)
            for member in members:
                (copy / member).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / member / "Cargo.toml", copy / member / "Cargo.toml")
            for _ in range(2):
                told = run("scripts/release/set-repository", "https://example.org/a/b", folder=copy)
                self.assertEqual(told.returncode, 0, told.stderr)
            package = tomllib.loads((copy / "Cargo.toml").read_text())["workspace"]["package"]
            self.assertEqual(package["repository"], "https://example.org/a/b")
            for member in members:
                package = tomllib.loads((copy / member / "Cargo.toml").read_text())["package"]
                self.assertEqual(package["repository"], {"workspace": True}, member)
            urls = tomllib.loads((copy / "python" / "pyproject.toml").read_text())["project"]["urls"]
            self.assertEqual(urls["Issues"], "https://example.org/a/b/issues")


class Wheel(Scratch):
    def setUp(self) -> None:
        super().setUp()
        self.file = self.folder / "kv-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.file, "w") as archive:
            archive.writestr("kv/__init__.py", "")
            archive.writestr("kv-1.0.dist-info/METADATA", "Name: kv\nLicense-File: LICENSE\n\nA description.\n\nIts end.\n")
            archive.writestr("kv-1.0.dist-info/RECORD", "kv/__init__.py,,\n")

    def test_an_installer_finds_the_program_and_the_notices(self) -> None:
        wheel.complete(self.file, b"a program", b"notices")
        with zipfile.ZipFile(self.file) as archive:
            program = archive.getinfo("kv-1.0.data/scripts/terrace")
            self.assertTrue(program.external_attr >> 16 & stat.S_IXOTH)
            metadata = archive.read("kv-1.0.dist-info/METADATA").decode()
            names = archive.namelist()
            record = {line[0]: line[1] for line in csv.reader(io.StringIO(archive.read(names[-1]).decode()))}
            digests = {name: hashlib.sha256(archive.read(name)).digest() for name in names[:-1]}
        self.assertIn("License-File: THIRD-PARTY-NOTICES\n\nA description.\n\nIts end.\n", metadata)
        self.assertIn("kv-1.0.dist-info/licenses/THIRD-PARTY-NOTICES", names)
        self.assertEqual(record.pop("kv-1.0.dist-info/RECORD"), "")
        told = {name: f"sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')}" for name, digest in digests.items()}
        self.assertEqual(record, told)

    def test_a_wheel_is_completed_once(self) -> None:
        wheel.complete(self.file, b"a program", b"notices")
        with self.assertRaisesRegex(ValueError, "complete already"):
            wheel.complete(self.file, b"another", b"notices")


class Notices(unittest.TestCase):
    def test_every_linked_crate_has_the_text_of_its_licence(self) -> None:
        target = run("scripts/release/program", "--target").stdout.strip()
        features = run("scripts/release/program", "--features").stdout.strip()
        told = run("python3", "packaging/notices.py", "--target", target, f"cli/Cargo.toml:{features}", "python/Cargo.toml:s3")
        self.assertEqual(told.returncode, 0, told.stderr)
        lines = dict(re.findall(r"^(\S+ \d\S*): (.*)$", told.stdout, re.MULTILINE))
        for name in ("clap", "numpy", "object_store", "pyo3", "tokio"):
            self.assertTrue(any(line.startswith(f"{name} ") for line in lines), name)
        self.assertFalse(any(line.startswith("terrace") for line in lines), "our own are not third parties'")
        numbers = {int(number) for number in re.findall(r"^---- Text (\d+) ----$", told.stdout, re.MULTILINE)}
        for crate, line in lines.items():
            texts = re.search(r"Texts: ([\d, ]+)\.", line)
            self.assertTrue(texts and {int(number) for number in texts[1].split(", ")} <= numbers, crate)

    def test_a_crate_without_a_licence_text_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            package = {"license": "ISC", "manifest_path": f"{folder}/Cargo.toml", "authors": []}
            with self.assertRaisesRegex(ValueError, "odd 1.0"):
                notices.report({notices.Crate("odd", "1.0"): package})
            Path(folder, "COPYING").write_text("Do as you like.")
            self.assertIn("Do as you like.", notices.report({notices.Crate("odd", "1.0"): package}))


class Files(Scratch):
    def test_checksums_are_those_of_all_files(self) -> None:
        for name in ("b.whl", "a.tar.gz"):
            (self.folder / name).write_text(name)
        self.assertEqual(run("scripts/release/checksums", str(self.folder)).returncode, 0)
        told = (self.folder / "SHA256SUMS").read_text().splitlines()
        self.assertEqual([line.split()[1] for line in told], ["a.tar.gz", "b.whl"])
        self.assertEqual(told[0].split()[0], hashlib.sha256(b"a.tar.gz").hexdigest())

    def test_no_files_have_no_checksums(self) -> None:
        self.assertEqual(run("scripts/release/checksums", str(self.folder)).returncode, 1)

    def test_an_image_has_the_program_of_an_archive(self) -> None:
        scripts = self.folder / "scripts" / "release"
        scripts.mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "release" / "image-files", scripts)
        for machine in ("x86_64", "aarch64"):
            name = f"terrace-1.0-{machine}-unknown-linux-gnu"
            with tarfile.open(self.folder / f"{name}.tar.gz", "w:gz") as archive:
                for file in ("terrace", "THIRD-PARTY-NOTICES", "CHANGELOG.md"):
                    told = tarfile.TarInfo(f"{name}/{file}")
                    told.size = len(machine)
                    archive.addfile(told, io.BytesIO(machine.encode()))
        told = run("scripts/release/image-files", str(self.folder), folder=self.folder)
        self.assertEqual(told.returncode, 0, told.stderr)
        self.assertEqual((self.folder / "dist" / "arm64" / "terrace").read_text(), "aarch64")
        self.assertEqual(sorted(os.listdir(self.folder / "dist" / "amd64")), ["THIRD-PARTY-NOTICES", "terrace"])


class Workflows(unittest.TestCase):
    def test_they_call_scripts_that_exist(self) -> None:
        called = set()
        for file in (ROOT / ".github" / "workflows").glob("*.yml"):
            called |= set(re.findall(r"\bscripts/[\w/-]+", file.read_text())) - {"scripts/release"}
        self.assertIn("scripts/python-wheel", called)
        for name in called:
            self.assertTrue(os.access(ROOT / name, os.X_OK), name)

    def test_their_jobs_need_jobs_that_exist(self) -> None:
        try:
            import yaml
        except ImportError:
            self.skipTest("PyYAML is not installed")
        for file in (ROOT / ".github" / "workflows").glob("*.yml"):
            jobs = yaml.safe_load(file.read_text())["jobs"]
            for name, job in jobs.items():
                needs = job.get("needs", [])
                self.assertLessEqual({needs} if isinstance(needs, str) else set(needs), jobs.keys(), f"{file.name}: {name}")
                for step in job.get("steps", []):
                    self.assertEqual(len({"run", "uses"} & step.keys()), 1, f"{file.name}: {name}: {step}")
                self.assertTrue("timeout-minutes" in job or "uses" in job, f"{file.name}: {name} has no limit")

    def test_they_use_the_minimum_version_of_rust(self) -> None:
        rust = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
        for file in (ROOT / ".github" / "workflows").glob("*.yml"):
            self.assertIn(f'RUST: "{rust}.0"', file.read_text(), file.name)


if __name__ == "__main__":
    unittest.main()
