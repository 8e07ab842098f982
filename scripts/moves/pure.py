"""Prove that product code differs in imports and named strings only: pure.py CLONE OLD NEW."""
import ast, subprocess, sys
root, old, new = sys.argv[1:4]
def git(*a): return subprocess.run(["git", *a], cwd=root, check=True, capture_output=True, text=True).stdout
pairs, odd, seen = {}, [], 0
names = git("diff", "-M30%", "--name-status", "-l20000", old, new).strip().split("\n")
def strip(tree):
    class T(ast.NodeTransformer):
        def visit_Import(self, n): return ast.Pass()
        def visit_ImportFrom(self, n): return ast.Pass()
    tree = T().visit(tree)
    strings = []
    for n in ast.walk(tree):
        for f in ("body", "orelse", "finalbody"):
            v = getattr(n, f, None)
            if isinstance(v, list): setattr(n, f, [x for x in v if not isinstance(x, ast.Pass)])
        if isinstance(n, ast.Constant) and isinstance(n.value, (str, bytes)):
            strings.append(n.value); n.value = ""
    return ast.dump(tree), strings
for line in names:
    parts = line.split("\t")
    if parts[0][0] not in "RM" or not parts[-1].endswith(".py"):
        if parts[0][0] in "AD" and parts[-1].endswith(".py"): odd.append(line)
        continue
    if parts[-1].startswith("tests/") and len(sys.argv) < 5: continue
    a, b = (git("show", f"{rev}:{p}") for rev, p in ((old, parts[1]), (new, parts[-1])))
    try: (da, sa), (db, sb) = strip(ast.parse(a)), strip(ast.parse(b))
    except SyntaxError: continue
    seen += 1
    if da != db: odd.append(f"code differs: {parts[-1]}")
    elif len(sa) == len(sb):
        for x, y in zip(sa, sb):
            if x != y and (not isinstance(x, str) or "\n" not in x and " " not in x): pairs[(x, y)] = parts[-1]
            elif x != y and isinstance(x, str) and " ".join(x.split()) != " ".join(y.split()): pairs.setdefault(("text", "text"), []).append((parts[-1], x, y))
print(seen, "modules compared"); print("\n".join(odd))
for (x, y), f in sorted(((k, v) for k, v in pairs.items() if k != ("text", "text")), key=repr): print(f"{f}: {x!r} -> {y!r}")
import difflib
for f, x, y in pairs.get(("text", "text"), []):
    wx, wy = x.split(), y.split()
    print(f, [(u, v) for u, v in zip(wx, wy) if u != v][:3] if len(wx) == len(wy) else "text of another length")
