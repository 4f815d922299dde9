"""Draws which package imports which, for docs/design.md, and checks the arrows.

    python tools/draw_imports.py            # the drawing, in Mermaid
    python tools/draw_imports.py --write    # puts it into docs/design.md
    python tools/draw_imports.py --check    # exit status 1 and the reasons where something is wrong

What is wrong: the drawing in docs/design.md is another; modules, or the folders of the library or
of the kernels, import each other in a circle; an arrow goes against integration, lab ->
megaopt -> kernels, or against lab -> recording -> kernels, as the recording knows no optimizer
of ours and no optimizer imports it; a module outside megaopt/params asks of what class a parameter
is. Imports are read from the source, those within functions too; those under TYPE_CHECKING are not
made when the code runs and count in the kernels alone. An import of a module also runs its
packages' __init__.py: that is no arrow.
"""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = {
    "megaopt": "megaopt",
    "kernels": "megaopt.kernels",
    "integration": "megaopt.integration",
}
PAGE = Path("docs/design.md")
BEGIN, END = "<!-- imports: tools/draw_imports.py -->", "<!-- end of imports -->"

KINDS = ("DTensor", "Float8Weight", "Float8Shard", "ForeignWeight")
"""Classes of parameters."""

# by the beginning of a module's name, the longest first; `python -m megaopt` is the command line
PARTS = {
    "megaopt.__main__": "lab",
    "megaopt.lab": "lab",
    "megaopt.integration": "integration",
    "megaopt.kernels": "kernels",
    "megaopt.recording": "recording",
    "megaopt": "megaopt",
}
ALLOWED = {
    "lab": {"lab", "integration", "recording", "megaopt", "kernels"},
    "integration": {"integration", "megaopt", "kernels"},
    "megaopt": {"megaopt", "kernels"},
    "recording": {"recording", "kernels"},
    "kernels": {"kernels"},
}


def modules_of(root: Path) -> dict[str, Path]:
    """Return the files of the three folders, by the names under which they are imported."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            names = path.relative_to(root / folder).with_suffix("").parts
            found[".".join([package, *names]).removesuffix(".__init__")] = path
    return found


def part_of(module: str) -> str:
    """Return which of ALLOWED's parts a module belongs to."""
    return next(part for begin, part in PARTS.items() if f"{module}.".startswith(f"{begin}."))


def package_of(module: str, modules: dict[str, Path]) -> str:
    """Return the package in which a module lies; outside the library each part counts as one."""
    if part_of(module) != "megaopt":
        return f"megaopt.{part_of(module)}"
    is_package = modules[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


@functools.cache
def imports_of(text: str, typed: bool = False) -> tuple[str, ...]:
    """Return the dotted names that a source imports, typed: those under TYPE_CHECKING too.

    Of `from a import b` it is "a.b".
    """
    return tuple(_imports(text, typed))


def _imports(text: str, typed: bool) -> Iterator[str]:
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if not typed and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))
        waiting += ast.iter_child_nodes(node)


def arrows(modules: dict[str, Path], typed: bool = False) -> networkx.DiGraph:
    """Return the modules, each with arrows to those that it imports; typed: as imports_of."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(modules)
    for module, path in modules.items():
        for name in imports_of(path.read_text(encoding="utf-8"), typed):
            # of "megaopt.adam.FusedAdam" the module is "megaopt.adam"
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                graph.add_edge(module, target)
    return graph


def circles(graph: networkx.DiGraph) -> list[list[str]]:
    """Return the groups of modules of which each imports, over others, each."""
    groups = networkx.strongly_connected_components(graph)
    return sorted(sorted(group) for group in groups if len(group) > 1)


def folder_circles(graph: networkx.DiGraph, modules: dict[str, Path]) -> list[list[str]]:
    """Return the same of the library's folders; what their __init__.py imports does not count."""
    parts = ("megaopt", "recording")
    own = [m for m, path in modules.items() if part_of(m) in parts and path.stem != "__init__"]
    return _between(graph.subgraph(own), {module: module.rpartition(".")[0] for module in own})


def kernel_circles(modules: dict[str, Path]) -> list[list[str]]:
    """Return the same of the kernels' modules and folders, by types too.

    A module beside the folders counts as one: a table may import all of them.
    """
    own = {m: path for m, path in modules.items() if part_of(m) == "kernels"}
    graph = arrows(own, typed=True)
    folders = {m: m if path.stem == "__init__" else m.rpartition(".")[0] for m, path in own.items()}
    root = FOLDERS["kernels"]
    folders = {m: m if folder == root else folder for m, folder in folders.items()}
    return circles(graph) + _between(graph, folders)


def _between(graph: networkx.DiGraph, folders: dict[str, str]) -> list[list[str]]:
    """Return the circles of folders, by module."""
    pairs = {(folders[a], folders[b]) for a, b in graph.edges}
    return circles(networkx.DiGraph(pair for pair in pairs if pair[0] != pair[1]))


def against_the_order(graph: networkx.DiGraph) -> list[str]:
    """Return the arrows that ALLOWED does not have."""
    return sorted(
        f"{module} imports {target}"
        for module, target in graph.edges
        if part_of(target) not in ALLOWED[part_of(module)]
    )


def drawing(graph: networkx.DiGraph, modules: dict[str, Path]) -> str:
    """Return packages and arrows in Mermaid; what comes over another package has no arrow."""
    packages = networkx.DiGraph()
    packages.add_nodes_from({package_of(module, modules) for module in modules})
    pairs = {(package_of(a, modules), package_of(b, modules)) for a, b in graph.edges}
    packages.add_edges_from(pair for pair in pairs if pair[0] != pair[1])
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"    {a} --> {b}" for a, b in sorted(_shortened(packages))]
    return "\n".join([*lines, "```"])


def _shortened(packages: networkx.DiGraph) -> set[tuple[str, str]]:
    """Leave out arrows between packages that others lead along; packages may form circles."""
    whole = networkx.condensation(packages)
    kept = networkx.transitive_reduction(whole).edges
    group = whole.graph["mapping"]
    return {
        (a, b) for a, b in packages.edges if group[a] == group[b] or (group[a], group[b]) in kept
    }


def kinds_asked_for(modules: dict[str, Path]) -> list[str]:
    """Return where a module outside megaopt.params asks of what kind a parameter is."""
    found = []
    for module, path in modules.items():
        # the commands in lab have models of their own, as users do
        is_home = module.startswith(("megaopt.params", "megaopt.kernels.shards"))
        if is_home or part_of(module) == "lab":
            continue
        found += [f"{module}, line {each}" for each in _askers(path.read_text(encoding="utf-8"))]
    return sorted(found)


@functools.cache
def _askers(text: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [f"{node.lineno}: {ast.unparse(node)}" for node in calls if _asks(node)]


def _asks(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    if function == "isinstance":
        return any(kind in ast.unparse(call.args[1]) for kind in KINDS)
    return function == "is_dtensor"


def put_into(page: str, drawn: str) -> str:
    """Return the page with the drawing between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{drawn}\n{END}{after}"


def faults(root: Path) -> list[str]:
    """Return what is wrong in a checkout, in words."""
    modules = modules_of(root)
    graph = arrows(modules)
    found = [f"against the order: {arrow}" for arrow in against_the_order(graph)]
    found += [f"circle: {', '.join(circle)}" for circle in circles(graph)]
    around = folder_circles(graph, modules) + kernel_circles(modules)
    found += [f"circle of folders: {', '.join(each)}" for each in around]
    found += [f"asks for a parameter's kind: {place}" for place in kinds_asked_for(modules)]
    page = (root / PAGE).read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        found.append(f"{PAGE} must have the lines {BEGIN} and {END}")
    elif put_into(page, drawing(graph, modules)) != page:
        found.append(f"{PAGE} has another drawing: python tools/draw_imports.py --write")
    return found


def main(arguments: list[str]) -> int:
    """Draw, write or check."""
    if arguments == ["--check"]:
        found = faults(REPOSITORY)
        for fault in found:
            print(fault, file=sys.stderr)
        return 1 if found else 0
    modules = modules_of(REPOSITORY)
    drawn = drawing(arrows(modules), modules)
    if arguments == ["--write"]:
        path = REPOSITORY / PAGE
        path.write_text(put_into(path.read_text(encoding="utf-8"), drawn), encoding="utf-8")
    elif arguments:
        print(f"arguments must be --check, --write or none, got {arguments}", file=sys.stderr)
        return 2
    else:
        print(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
