"""Static proof on a moved clone: each import and each dotted name or path of ours in a string exists."""
import ast, re, subprocess, sys
from pathlib import Path
root = Path(sys.argv[1]); old = set(sys.argv[2].split(",")) if len(sys.argv) > 2 else set()
files = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True).stdout.split("\n")
fileset = set(files)
mods = {f.removesuffix(".py").removesuffix("/__init__").replace("/", "."): root / f for f in files if f.endswith(".py")}
OURS = ("nekro", "workers", "storage", "broker_config", "nekro_agent", "nekro_client", "plugin_pkgs", "benchmarks")
names = {}
def members(module):
    if module not in names:
        found = set()
        tree = ast.parse(mods[module].read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): found.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)): found |= {(a.asname or a.name).partition(".")[0] for a in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store): found.add(node.id)
            elif isinstance(node, ast.TypeAlias) if hasattr(ast, "TypeAlias") else False: found.add(node.name.id)
        names[module] = found
    return names[module]
bad = []
dotted = re.compile(r"(?<![\w./\-@{}$])(?:%s)(?:\.[A-Za-z_]\w*)+" % "|".join(OURS))
olds = re.compile(r"(?<![\w./\-@{}$`])(?:%s)(?:[./][a-z_]\w*)+" % "|".join(old)) if old else None
for f in files:
    p = root / f
    if not f.endswith(".py") or f.startswith(("tests/plugins/authored", "tests/plugins/home_data")): continue
    try: tree = ast.parse(p.read_text("utf-8-sig"))
    except SyntaxError: continue
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            top = node.module.partition(".")[0]
            if top in old and node.module not in sys.stdlib_module_names: bad.append(f"{f}:{node.lineno}: from {node.module}")
            if top in OURS:
                if node.module not in mods: bad.append(f"{f}:{node.lineno}: no module {node.module}"); continue
                for a in node.names:
                    if a.name != "*" and f"{node.module}.{a.name}" not in mods and a.name not in members(node.module) and "__getattr__" not in members(node.module):
                        bad.append(f"{f}:{node.lineno}: {node.module} has no {a.name}")
        elif isinstance(node, ast.Import):
            for a in node.names:
                top = a.name.partition(".")[0]
                if top in OURS and a.name not in mods or top in old: bad.append(f"{f}:{node.lineno}: import {a.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for m in dotted.finditer(node.value):
                parts = m[0].split(".")
                best = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in mods), 0)
                if best == 0 or (best < len(parts) and parts[best] not in members(".".join(parts[:best]))):
                    bad.append(f"{f}:{node.lineno}: string {m[0]}")
            for m in re.finditer(r"(?<![\w./\-])(?:%s)(?:/[\w.]+)+" % "|".join(OURS), node.value):
                path = m[0].rstrip(".")
                if path not in fileset and not any(x.startswith(path.rstrip("/") + "/") for x in files):
                    bad.append(f"{f}:{node.lineno}: path {m[0]}")
            if olds:
                for m in olds.finditer(node.value): bad.append(f"{f}:{node.lineno}: old {m[0]}")
print("\n".join(bad)); print(len(bad), "findings", file=sys.stderr)
