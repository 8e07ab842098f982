"""Merge modules by topic: ``merge.py CLONE SPEC.py [--ruff PATH] [--no-commit]``.

SPEC.py defines MESSAGE (commit message) and MERGES, a list of ``(new path, docstring, [old paths])``, in which the
new path may be one of the old ones, and one old path alone is a plain move. Optional: RENAMES
``{old path: {name: new name}}`` for top-level names that would clash; TABLES, a function ``(step) -> None``
for further edits before the references are rewritten. Old paths that do not exist are reported and skipped.
Every reference in code, tests, docs is rewritten. Fails, changing nothing, on clashes of names.
"""

import argparse
import ast
import importlib.util
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from engine import Fail, Step, git, is_python, log


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def segment_offsets(text: str):
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    return offset


def apply(text: str, changes) -> str:
    for begin, end, new in sorted(set(changes), reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def rename(text: str, names: dict[str, str]) -> str:
    """Rename plain names everywhere in a module."""
    if not names:
        return text
    tree, offset, changes = ast.parse(text), segment_offsets(text), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            begin = offset(node.lineno, node.col_offset)
            changes.append((begin, begin + len(node.id), names[node.id]))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in names:
            begin = offset(node.lineno, node.col_offset)
            at = text.index(node.name, begin + len("class" if isinstance(node, ast.ClassDef) else "def"))
            if isinstance(node, ast.AsyncFunctionDef):
                at = text.index(node.name, text.index("def ", begin) + 4)
            if node.col_offset == 0:
                changes.append((at, at + len(node.name), names[node.name]))
        elif isinstance(node, ast.Global):
            begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
            changes.append((begin, end, "global " + ", ".join(names.get(n, n) for n in node.names)))
        elif isinstance(node, ast.arg) and node.arg in names:
            raise Fail(f"{node.arg} is an argument too (line {node.lineno}): rename by hand")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
            # A name in quotes: a forward reference or an entry of __all__.
            begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
            changes.append((begin, end, text[begin:end].replace(node.value, names[node.value])))
    return apply(text, changes)


class Part:
    """One old module, taken apart."""

    def __init__(self, path: str, text: str, group: dict[str, str]):
        self.path, self.module = path, dotted(path)
        self.needs: set[str] = set()  # modules of the group that this one needs while it is imported
        text = self.without_group(text, group)
        self.text = text
        tree = ast.parse(text)
        lines = text.split("\n")
        self.doc = ast.get_docstring(tree)
        self.imports: list[str] = []
        self.typing: list[str] = []
        self.all: list[str] = []
        self.body: list[str] = []
        self.names: dict[str, str] = {}  # defined name -> dump
        self.imported: dict[str, str] = {}
        self.main: list[str] = []
        last = 0
        for index, node in enumerate(tree.body):
            first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
            lead = "\n".join(lines[last : first - 1])
            source = "\n".join(lines[first - 1 : node.end_lineno])
            if ";" in source and isinstance(node, ast.Import):
                raise Fail(f"{path}: two statements in line {first}")
            last = node.end_lineno
            if index == 0 and self.doc is not None and isinstance(node, ast.Expr):
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                    continue
                self.imports.append((lead.strip("\n") + "\n" if lead.strip() else "") + source)
                self.note_imports(node)
            elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" and not node.orelse and all(isinstance(x, ast.Import | ast.ImportFrom) for x in node.body):
                self.typing.append("\n".join(lines[node.body[0].lineno - 1 : node.end_lineno]))
                for x in node.body:
                    self.note_imports(x)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
                self.all += ast.literal_eval(node.value)
            elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                self.main.append(lead + "\n" + source)
            else:
                self.body.append((lead, source, node))
                for name in bound(node):
                    self.names[name] = ast.dump(node)
        self.tail = "\n".join(lines[last:]).strip()

    def note_imports(self, node) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            what = f"{getattr(node, 'module', '')}:{alias.name if not isinstance(node, ast.Import) or alias.asname else alias.name.partition('.')[0]}"
            self.imported[name] = what

    def without_group(self, text: str, group: dict[str, str]) -> str:
        """Drop imports of modules of the group and let their names stand for themselves."""
        tree, offset = ast.parse(text), segment_offsets(text)
        changes, names, modules = [], {}, {}
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        late: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                keep, hit = [], False
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    if full in group and full != self.module:
                        modules[alias.asname or alias.name] = full
                        hit = True
                    elif node.module in group and node.module != self.module:
                        target = group[node.module].get(alias.name, alias.name)
                        if (alias.asname or alias.name) != target:
                            names[alias.asname or alias.name] = target
                        hit = True
                    else:
                        keep.append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
                if not hit:
                    continue
                parent = parents[node]
                if isinstance(parent, ast.Module):
                    self.needs.add(node.module if node.module in group else next(iter(modules.values())))
                    for full in list(modules.values()):
                        self.needs.add(full)
                begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
                if keep:
                    changes.append((begin, end, f"from {node.module} import {', '.join(keep)}"))
                elif isinstance(getattr(parent, "body", None), list) and parent.body == [node] and not isinstance(parent, ast.Module):
                    if isinstance(parent, ast.If) and ast.unparse(parent.test) == "TYPE_CHECKING" and not parent.orelse:
                        changes.append((offset(parent.lineno, parent.col_offset), end, ""))
                    else:
                        changes.append((begin, end, "pass"))
                elif isinstance(parent, ast.If) and ast.unparse(parent.test) == "TYPE_CHECKING" and all(self.is_dropped(x, group) for x in parent.body):
                    changes.append((offset(parent.lineno, parent.col_offset), offset(parent.end_lineno, parent.end_col_offset), ""))
                else:
                    stop = text.index("\n", end)
                    rest = text[end:stop]
                    if rest.strip() and not rest.strip().startswith("#"):
                        raise Fail(f"{self.path}:{node.lineno}: more on the line of an import")
                    changes.append((offset(node.lineno, 0), stop + 1, ""))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in group:
                        raise Fail(f"{self.path}:{node.lineno}: import {alias.name}: write it as from … import")
        if modules:
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                    begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
                    target = group[modules[node.value.id]].get(node.attr, node.attr)
                    changes.append((begin, end, target))
                elif isinstance(node, ast.Name) and node.id in modules and not isinstance(parents.get(node), ast.Attribute):
                    raise Fail(f"{self.path}:{node.lineno}: {node.id} is used as a value")
        # Blocks of TYPE_CHECKING are dropped once though each of their imports asked for it.
        spans = sorted(set(changes))
        outer = [c for c in spans if not any(o is not c and o[0] <= c[0] and c[1] <= o[1] and o[2] == "" and (o[1] - o[0]) > (c[1] - c[0]) for o in spans)]
        text = apply(text, outer)
        return rename(text, names)

    @staticmethod
    def is_dropped(node, group) -> bool:
        return isinstance(node, ast.ImportFrom) and all(node.module in group or f"{node.module}.{a.name}" in group for a in node.names)


def bound(node) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    found = []
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.append(child.id)
    if isinstance(node, getattr(ast, "TypeAlias", ())):
        found.append(node.name.id)
    return list(dict.fromkeys(found))


def local_names(tree) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}


def merged(step: Step, new: str, doc: str, olds: list[str], renames) -> str:
    group = {dotted(old): renames.get(old, {}) for old in olds}
    parts = []
    for old in olds:
        text = (step.root / old).read_text("utf-8")
        text = rename(text, renames.get(old, {}))
        try:
            parts.append(Part(old, text, group))
        except Fail as exc:
            raise Fail(f"{new}: {exc}") from None
    # Those that others need while they are imported come first.
    ordered, left = [], parts
    while left:
        done = {p.module for p in ordered}
        ready = [p for p in left if not ({m for m in p.needs if m in group and m != p.module} - done)]
        if not ready:
            raise Fail(f"{new}: a cycle between {[p.path for p in left]}")
        ordered.append(ready[0])
        left = [p for p in left if p is not ready[0]]
    clashes, seen, imported, drop = [], {}, {}, set()
    for part in ordered:
        for name, dump in part.names.items():
            if name in seen:
                if seen[name][1] == dump:
                    drop.add((part.path, name))
                else:
                    clashes.append(f"{name} is defined in {seen[name][0]} and {part.path}")
            else:
                seen[name] = (part.path, dump)
        for name, what in part.imported.items():
            if imported.get(name, what) != what:
                clashes.append(f"{name} is imported as {imported[name]} and as {what} ({part.path})")
            imported.setdefault(name, what)
    for name in seen:
        if name in imported and name != "TYPE_CHECKING":
            clashes.append(f"{name} is defined in {seen[name][0]} and imported as {imported[name]}")
    if clashes:
        raise Fail(f"{new}: " + "; ".join(clashes))
    # A local variable or argument of one part may hide a name of another: that only matters where the part
    # uses the other's name, which it then had under the same name before.
    out = [f'"""{doc.strip()}"""' if '"' not in doc[-1:] else f'"""{doc.strip()} """', "", "from __future__ import annotations", ""]
    for part in ordered:
        out += part.imports
    typing = [t for p in ordered for t in p.typing]
    if typing:
        if not any("TYPE_CHECKING" in i for p in ordered for i in p.imports):
            out.append("from typing import TYPE_CHECKING")
        out += ["", "if TYPE_CHECKING:", *typing]
    names = [n for p in ordered for n in p.all]
    if names:
        out += ["", "__all__ = [", *[f'    "{n}",' for n in sorted(set(names))], "]"]
    out.append("")
    for part in ordered:
        if len(olds) > 1 and part.doc and len(part.doc) > 200:
            log(f"note: {new}: the docstring of {part.path} has {len(part.doc)} characters: put what matters into the new one")
        for lead, source, node in part.body:
            if bound(node) and all((part.path, name) in drop for name in bound(node)):
                continue
            out.append(lead)
            out.append(source)
        if part.tail:
            out.append(part.tail)
        out.append("")
    for part in ordered:
        out += part.main
    text = "\n".join(out).rstrip("\n") + "\n"
    # A module without annotations that need it keeps none of the future import only if no part had it.
    if not any("from __future__ import annotations" in (step.root / old).read_text("utf-8") for old in olds):
        text = text.replace("from __future__ import annotations\n\n", "", 1)
    ast.parse(text)
    return text


class Merge(Step):
    def __init__(self, root, ruff, renames):
        super().__init__(root, ruff)
        self.renamed = {(dotted(old), a): b for old, names in renames.items() for a, b in names.items()}

    def new_module(self, name):
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            head = ".".join(parts[:length])
            if (head, parts[length]) in self.renamed:
                parts[length] = self.renamed[(head, parts[length])]
                name = ".".join(parts)
                return super().new_module(name) or name
        return super().new_module(name)

    def import_from(self, node, text, offset):
        groups: dict[str, list[str]] = {}
        changed = renamed = False
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            if full in self.modules:
                module, _, leaf = self.modules[full].rpartition(".")
            elif full in self.stay:
                module, leaf = node.module, alias.name
            else:
                leaf = self.renamed.get((node.module, alias.name), alias.name)
                module = super().new_module(node.module) or node.module
            word = leaf + (f" as {alias.asname}" if alias.asname and alias.asname != leaf else "")
            if leaf != alias.name:
                renamed = True
                if not alias.asname:
                    word = f"{leaf} as {alias.name}"
                    if full in self.modules:
                        self.aliases.add((alias.name, leaf))
            if module != node.module:
                changed = True
            groups.setdefault(module, []).append(word)
        if not changed and not renamed:
            return None
        begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        old = text[begin:end]
        if len(groups) == 1 and not renamed:
            (module,) = groups
            return begin, begin + len(f"from {node.module}"), f"from {module}"
        if "#" in old:
            self.notes.append(f"comment in a split import: {old!r}")
        indent = " " * node.col_offset
        parts = [f"from {module} import {', '.join(dict.fromkeys(words))}" for module, words in groups.items()]
        return begin, end, f"\n{indent}".join(parts)

    def in_python(self, text, *, strings):
        self.aliases = set()
        new = super().in_python(text, strings=strings)
        # `from pkg import new as old`: use the new name where nothing else has it.
        for old, leaf in sorted(self.aliases):
            tree = ast.parse(new)
            stores = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == old and not isinstance(n.ctx, ast.Load)]
            if stores or any(isinstance(n, ast.arg) and n.arg == old for n in ast.walk(tree)):
                continue
            imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
            if leaf in local_names(tree) and leaf not in imported or re.search(rf"import .*\b\w+ as {leaf}\b", new):
                continue
            if any(isinstance(n, ast.Import | ast.ImportFrom) and any((a.asname or a.name) == leaf and not (isinstance(n, ast.ImportFrom) and f"{n.module}.{a.name}" in self.modules.values()) for a in n.names) for n in ast.walk(tree)):
                continue
            offset = segment_offsets(new)
            changes = [
                (offset(n.lineno, n.col_offset), offset(n.lineno, n.col_offset) + len(old), leaf)
                for n in ast.walk(tree)
                if isinstance(n, ast.Name) and n.id == old
            ]
            new = apply(new, changes)
            new = re.sub(rf"\b{leaf} as {old}\b", leaf, new)
        return new


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clone", type=Path)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--ruff", default=None)
    parser.add_argument("--no-commit", action="store_true")
    options = parser.parse_args()
    root = options.clone.resolve()
    if git(root, "status", "--porcelain", "--untracked-files=no"):
        sys.exit("the clone has changes; commit or stash them")
    loader = importlib.util.spec_from_file_location("spec", options.spec)
    spec = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(spec)
    renames = getattr(spec, "RENAMES", {})
    step = Merge(root, options.ruff or str(root / ".venv/bin/ruff"), renames)
    texts: dict[str, str] = {}
    problems = []
    for new, doc, olds in spec.MERGES:
        missing = [old for old in olds if old not in step.files]
        if missing:
            log("missing:", *missing)
        olds = [old for old in olds if old in step.files]
        if not olds:
            continue
        if new in step.files and new not in olds:
            problems.append(f"{new} exists and is not one of the merged")
            continue
        try:
            texts[new] = merged(step, new, doc, olds, renames) if len(olds) > 1 or doc or renames.get(olds[0]) else (root / olds[0]).read_text("utf-8")
        except Fail as exc:
            problems.append(str(exc))
        for old in olds:
            step.paths[old] = new
    if problems:
        sys.exit("\n".join(problems))
    for old in step.paths:
        (root / old).unlink()
    for new, text in texts.items():
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        (root / new).write_text(text, "utf-8")
    for old in sorted(step.paths, reverse=True):
        folder = (root / old).parent
        while folder != root and folder.is_dir() and not [p for p in folder.iterdir() if p.name != "__pycache__"]:
            import shutil
            shutil.rmtree(folder)
            folder = folder.parent
    git(root, "add", "-A")
    if hasattr(spec, "TABLES"):
        spec.TABLES(step)
    step.rewrite()
    step.format()
    for note in dict.fromkeys(step.notes):
        log("note:", note)
    if not options.no_commit:
        step.commit(spec.MESSAGE)
    log(f"{len(step.paths)} modules -> {len(texts)}")


if __name__ == "__main__":
    try:
        main()
    except Fail as exc:
        sys.exit(str(exc))
