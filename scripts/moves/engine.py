"""Moves modules of a clone and rewrites every reference to them. No state but the working tree."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

#: Text files that are never rewritten: history, pins, generated or foreign content.
SKIP = re.compile(
    r"^(CHANGELOG\.md|constraints\.txt|deploy/(requirements\.txt|helm/.*|grafana/.*)|docs/openapi\.json|LICENSE"
    r"|scripts/moves/.*|tests/plugins/authored/.*|tests/plugins/home_data/.*|tests/rounds/people_plugins/.*)$"
)
SUFFIXES = {".md", ".toml", ".yaml", ".yml", ".txt", ".in", ".cfg", ".ini", ".j2", ".sh", ".tsv"}
#: Strings that are data and look like a module.
DATA = {"sandbox.run", "agent.events"}


class Fail(Exception):
    pass


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def is_python(path: Path) -> bool:
    if path.suffix == ".py":
        return True
    return not path.suffix and path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3\n")


class Step:
    """One commit: moves, new files, edits, and the references that follow."""

    def __init__(self, root: Path, ruff: str):
        self.root, self.ruff = root, ruff
        self.files = git(root, "ls-files").strip().split("\n")
        self.paths: dict[str, str] = {}  # old file -> new file
        self.notes: list[str] = []

    # -- moves ---------------------------------------------------------------------------------

    def move(self, old: str, new: str) -> None:
        """A folder or a file; a later, longer rule wins over an earlier one."""
        found = [f for f in self.files if f == old or f.startswith(f"{old}/")]
        if not found:
            raise Fail(f"nothing to move: {old}")
        for file in found:
            self.paths[file] = new + file[len(old):]

    def carry_out(self) -> None:
        taken = set(self.files) - set(self.paths)
        for old, new in self.paths.items():
            if new in taken:
                raise Fail(f"{new} exists already (from {old})")
            taken.add(new)
        # Through a folder aside, so that no move meets a source that has not moved yet.
        for old, new in self.paths.items():
            if old != new:
                (self.root / new).parent.mkdir(parents=True, exist_ok=True)
                (self.root / old).rename(self.root / new)
        for old in sorted(self.paths, reverse=True):
            folder = (self.root / old).parent
            while folder != self.root and folder.is_dir():
                rest = [p for p in folder.iterdir() if p.name != "__pycache__"]
                if rest:
                    break
                subprocess.run(["rm", "-rf", str(folder)], check=True)
                folder = folder.parent
        git(self.root, "add", "-A")

    def create(self, path: str, text: str) -> None:
        file = self.root / path
        if file.exists():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")

    # -- edits ---------------------------------------------------------------------------------

    def edit(self, path: str, *pairs: tuple[str, str], optional: bool = False) -> None:
        """Replace texts of a file, each exactly once; a missing one fails unless ``optional``."""
        file = self.root / path
        if not file.exists():
            if optional:
                self.notes.append(f"{path}: does not exist")
                return
            raise Fail(f"{path} does not exist")
        text = file.read_text("utf-8")
        for old, new in pairs:
            if text.count(old) == 0:
                if optional:
                    self.notes.append(f"{path}: not found: {old!r}")
                    continue
                raise Fail(f"{path}: not found: {old!r}")
            text = text.replace(old, new)
        file.write_text(text, "utf-8")

    def sub(self, path: str, pattern: str, new: str, *, optional: bool = False) -> None:
        file = self.root / path
        text, count = re.subn(pattern, new, file.read_text("utf-8"), flags=re.M | re.S)
        if not count and not optional:
            raise Fail(f"{path}: not found: {pattern!r}")
        file.write_text(text, "utf-8")

    # -- references ------------------------------------------------------------------------------

    def prepare(self) -> None:
        def dotted(path: str) -> str:
            return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

        self.modules = {
            dotted(old): dotted(new)
            for old, new in self.paths.items()
            if old.endswith(".py") and dotted(old) != dotted(new)
        }
        #: Packages whose folder moved with everything in it, also those without modules (folders of data).
        folders: dict[str, set[str]] = {}
        for old in self.files:
            new = self.paths.get(old, old)
            parts = old.split("/")
            for depth in range(1, len(parts)):
                head, tail = "/".join(parts[:depth]), "/" + "/".join(parts[depth:])
                target = new[: -len(tail)] if new.endswith(tail) else "?"
                folders.setdefault(head, set()).add(target)
        self.folders = {
            old: next(iter(new)) for old, new in folders.items() if len(new) == 1 and {old} != new and new != {"?"}
        }
        self.split = {old for old, new in folders.items() if len(new) > 1}
        tops = sorted({old.split("/")[0] for old in self.paths})
        self.tops = tops
        names = "|".join(map(re.escape, tops))
        # Not before "=": a setting with its value.
        self.dotted_re = re.compile(rf"(?<![\w./\-@{{}}$])(?:{names})(?:\.[A-Za-z_]\w*)+(?![\w=])")
        self.word_re = re.compile(r"(?<=``)(codec|messaging|connectors)(?=``)")
        self.any_re = re.compile(rf"\b(?:{names})\b")
        self.path_re = re.compile(rf"(?<![\w./\-{{}}$])(?:{names})(?:/[\w.\-*…]*)+")
        self.call_re = re.compile(
            rf"(?<=\b)((?:PackageLoader|import_module|find_spec|files|walk_packages)\(\s*['\"])({names})(?=['\"])"
        )
        self.segment_re = re.compile(rf"[\w\])] / [\"']({names})[\"']")
        self.from_re = re.compile(rf"(?<=\bfrom )({names})(?= import\b)")

    def new_module(self, name: str) -> str | None:
        """Map a dotted name by its longest prefix that is a moved module."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            head = ".".join(parts[:length])
            if head in self.modules:
                return ".".join([self.modules[head], *parts[length:]])
            if (self.root_has(head)):
                return None
        return None

    def root_has(self, dotted: str) -> bool:
        """Whether a module of this name existed and did not move."""
        path = dotted.replace(".", "/")
        return any(
            f in self.file_set and self.paths.get(f, f) == f for f in (f"{path}.py", f"{path}/__init__.py")
        )

    def in_text(self, text: str, *, whole: bool = False) -> str:
        """Rewrite dotted names and paths in prose or in a string."""

        def name(match: re.Match[str]) -> str:
            found = match[0]
            if found in DATA or "." not in found:
                return found
            # A name of two parts counts if its module exists; "the sandbox.Run" does not.
            parts = found.split(".")
            if ".".join(parts[:2]) not in self.modules and not self.is_below_split(parts):
                return found
            return self.new_module(found) or found

        def path(match: re.Match[str]) -> str:
            found = match[0]
            body = found.rstrip(".…*")
            tail = found[len(body):]
            body, slash = (body[:-1], "/") if body.endswith("/") else (body, "")
            if body in self.paths:
                return self.paths[body] + slash + tail
            parts = body.split("/")
            for length in range(len(parts), 0, -1):
                head = "/".join(parts[:length])
                rest = "/".join(parts[length:])
                if head in self.folders and (length > 1 or not rest):
                    if length == 1 and (not slash or tail):
                        return found
                    return self.folders[head] + (f"/{rest}" if rest else "") + slash + tail
                if head in self.split and length > 1 and (not rest or body not in self.file_set):
                    self.notes.append(f"path of a split folder: {found}")
            return found

        text = self.dotted_re.sub(name, text)
        text = self.word_re.sub(lambda m: self.modules.get(m[1], m[1]), text)
        text = self.from_re.sub(lambda m: self.modules.get(m[1], m[1]), text)
        return self.path_re.sub(path, text)

    def is_below_split(self, parts: list[str]) -> bool:
        return any(".".join(parts[:n]) in self.modules for n in range(2, len(parts) + 1))

    def rewrite(self, keep_strings: set[str] = frozenset()) -> None:
        """Rewrite all files; ``keep_strings`` names Python files of which only imports are rewritten."""
        self.file_set = set(self.files)
        self.prepare()
        for name in git(self.root, "ls-files").strip().split("\n"):
            file = self.root / name
            if SKIP.match(name) or not file.is_file() or file.is_symlink():
                continue
            if is_python(file):
                text = file.read_text("utf-8")
                if not self.any_re.search(text):
                    continue
                try:
                    new = self.in_python(text, strings=name not in keep_strings)
                except SyntaxError:
                    continue
            elif file.suffix in SUFFIXES or (not file.suffix and name.partition("/")[0] != "nekro_client"):
                try:
                    text = file.read_text("utf-8")
                except UnicodeDecodeError:
                    continue
                new = self.in_text(text)
            else:
                continue
            if new != text:
                file.write_text(new, "utf-8")
            if is_python(file):
                for match in self.segment_re.finditer(new):
                    if (self.root / match[1]).exists():
                        continue
                    self.notes.append(f"look at {name}: {match[0]}")

    def in_python(self, text: str, *, strings: bool) -> str:
        tree = ast.parse(text)
        starts = [0]
        for line in text.split("\n"):
            starts.append(starts[-1] + len(line) + 1)
        lines = text.split("\n")

        def offset(line: int, column: int) -> int:
            return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

        changes: list[tuple[int, int, str]] = []
        plain: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                new = self.import_from(node, text, offset)
                if new is not None:
                    changes.append((*new,))
            elif isinstance(node, ast.Import):
                done = []
                for alias in node.names:
                    new = self.new_module(alias.name)
                    if new is None:
                        done.append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
                    elif alias.asname:
                        done.append(f"{new} as {alias.asname}")
                    else:
                        done.append(new)
                        plain[alias.name] = new
                if any(self.new_module(alias.name) for alias in node.names):
                    begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
                    changes.append((begin, end, f"import {', '.join(done)}"))
        if plain:
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute | ast.Name):
                    chain = ast.unparse(node)
                    if chain in plain:
                        begin = offset(node.lineno, node.col_offset)
                        end = offset(node.end_lineno, node.end_col_offset)
                        changes.append((begin, end, plain[chain]))
        if strings:
            taken = [(b, e) for b, e, _ in changes]
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                is_text = token.type in (tokenize.STRING, tokenize.COMMENT) or (
                    token.type == getattr(tokenize, "FSTRING_MIDDLE", -1)
                )
                if not is_text:
                    continue
                old = token.string
                new = self.in_text(old)
                if new != old:
                    begin = starts[token.start[0] - 1] + token.start[1]
                    end = starts[token.end[0] - 1] + token.end[1]
                    if not any(b <= begin < e for b, e in taken):
                        changes.append((begin, end, new))
        for begin, end, new in sorted(set(changes), reverse=True):
            text = text[:begin] + new + text[end:]
        if strings:
            text = self.call_re.sub(lambda m: m[1] + self.modules.get(m[2], m[2]), text)
        return text

    def import_from(self, node: ast.ImportFrom, text: str, offset) -> tuple[int, int, str] | None:
        """Return what replaces a ``from`` import: only its module where that suffices."""
        groups: dict[str, list[str]] = {}
        renamed = False
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            if full in self.modules:
                module, _, leaf = self.modules[full].rpartition(".")
            elif full in self.stay:
                module, leaf = node.module, alias.name
            else:
                module, leaf = self.new_module(node.module) or node.module, alias.name
            word = leaf + (f" as {alias.asname}" if alias.asname else "")
            if leaf != alias.name:
                renamed = True
                if not alias.asname:
                    word = f"{leaf} as {alias.name}"
            groups.setdefault(module, []).append(word)
        if set(groups) == {node.module} and not renamed:
            return None
        begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        old = text[begin:end]
        if len(groups) == 1 and not renamed:
            (module,) = groups
            return begin, begin + len(f"from {node.module}"), f"from {module}"
        if "#" in old:
            self.notes.append(f"comment in a split import: {old!r}")
        indent = " " * node.col_offset
        parts = [f"from {module} import {', '.join(words)}" for module, words in groups.items()]
        return begin, end, f"\n{indent}".join(parts)

    @property
    def stay(self) -> set[str]:
        if not hasattr(self, "_stay"):
            self._stay = {
                f.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                for f in self.files
                if f.endswith(".py") and self.paths.get(f, f) == f
            }
        return self._stay

    # -- the end ---------------------------------------------------------------------------------

    def format(self) -> None:
        git(self.root, "add", "-A")
        subprocess.run([self.ruff, "check", "--quiet", "--select", "I,RUF022", "--fix", "."], cwd=self.root, check=False)
        subprocess.run([self.ruff, "format", "--quiet", "."], cwd=self.root, check=True)
        for _ in range(4):
            if not self.wrap():
                break
        left = subprocess.run(
            [self.ruff, "check", "--output-format", "concise", "."], cwd=self.root, capture_output=True, text=True
        )
        self.notes += [line for line in left.stdout.split("\n") if re.match(r"\S+:\d+:", line)]

    def wrap(self) -> bool:
        """Wrap comments and docstrings that have become too long; returns whether something changed."""
        found = subprocess.run(
            [self.ruff, "check", "--select", "E501", "--output-format", "json", "."],
            cwd=self.root, capture_output=True, text=True,
        )
        places: dict[Path, list[int]] = {}
        for fault in json.loads(found.stdout or "[]"):
            places.setdefault(Path(fault["filename"]), []).append(fault["location"]["row"])
        changed = False
        for file, rows in places.items():
            text = file.read_text("utf-8")
            lines = text.split("\n")
            docs = {}
            for node in ast.walk(ast.parse(text)):
                value = getattr(node, "value", None)
                if isinstance(node, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docs.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), (node.lineno, node.end_lineno)))
            for row in sorted(rows, reverse=True):
                if lines[row - 1].lstrip().startswith("#"):
                    changed |= wrap_comment(lines, row - 1)
                elif row in docs:
                    changed |= wrap_doc(lines, row - 1, docs[row][1] - 1)
            file.write_text("\n".join(lines), "utf-8")
        return changed

    def commit(self, message: str) -> None:
        git(self.root, "add", "-A")
        subprocess.run(["git", "commit", "-q", "-F", "-"], cwd=self.root, input=message, text=True, check=True)


WIDTH = 110


def cut(line: str) -> tuple[str, str]:
    """Split a line at the last space that lets the first part fit."""
    at = line.rfind(" ", 0, WIDTH + 1)
    return line[:at].rstrip(), line[at + 1:]


def wrap_comment(lines: list[str], index: int) -> bool:
    head, rest = cut(lines[index])
    prefix = re.match(r"\s*#:? ?", lines[index])[0]
    if len(head) <= len(prefix):
        return False
    lines[index] = head
    following = lines[index + 1] if index + 1 < len(lines) else ""
    marker = prefix.rstrip()
    if following.startswith(prefix) and not following.startswith(f"{marker} -") and following.strip() != "#":
        lines[index + 1] = f"{prefix}{rest} {following[len(prefix):]}"
    else:
        lines.insert(index + 1, prefix + rest)
    return True


def wrap_doc(lines: list[str], index: int, last: int) -> bool:
    line = lines[index]
    indent = re.match(r"\s*", line)[0]
    head, rest = cut(line)
    if len(head) <= len(indent):
        return False
    lines[index] = head
    following = lines[index + 1] if index < last else ""
    body = following.strip()
    mark = re.match(r"\s*(- )?", line)[0]
    own = indent + ("  " if mark.endswith("- ") else "")
    if body and body != '"""' and not re.match(r"(- |\w+:( |$))", body) and len(following) - len(following.lstrip()) >= len(indent):
        space = following[: len(following) - len(following.lstrip())]
        lines[index + 1] = f"{space}{rest} {following.lstrip()}"
    else:
        lines.insert(index + 1, own + rest)
    return True


def log(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)
