"""The modelling code inside an exported folder, for people who do not have this package.

transformers loads such code (`trust_remote_code=True`) from single files that import one another relatively, all in one
folder. So the modules that the adapter needs are copied under flat names, `rmt.ops.norm` as `rmt_ops_norm.py`, and
their imports rewritten. The C++ and Triton operations stay behind: this code runs the portable ones.
"""

import ast
import importlib.util
import json
import re
from pathlib import Path

CONFIGURATION, MODELING = "rmt.hub.configuration", "rmt.hub.modeling"
FILES = {CONFIGURATION: "configuration_rmt", MODELING: "modeling_rmt"}
BY_NAME = ("rmt.ops.boundary.portable",)  # imported by a computed name, as the stream is
AUTO_MAP = {
    "AutoConfig": "configuration_rmt.RMTConfig",
    "AutoModel": "modeling_rmt.RMTModel",
    "AutoModelForCausalLM": "modeling_rmt.RMTForCausalLM",
}


def write_code(folder: Path) -> list[Path]:
    """Put the code beside the model in `folder` and name it in its config.json."""
    config = folder / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    from rmt.streams import STREAMS

    modules = needed([CONFIGURATION, MODELING, *BY_NAME, STREAMS[values["stream"]].partition(":")[0]])
    written = []
    for module in modules:
        text = rewrite(source(module))
        if module == MODELING:
            text = text.replace('OPS: Ops = "auto"', 'OPS: Ops = "portable"')
        if module in FILES:
            text = add_manifest(text, modules)
        written.append(folder / f"{flat(module)}.py")
        written[-1].write_text(text, encoding="utf-8")
    config.write_text(json.dumps(values | {"auto_map": AUTO_MAP}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return written


def needed(modules: list[str]) -> list[str]:
    """These modules and all of ours that they import, anywhere in their text."""
    found: dict[str, None] = {}
    while modules:
        module = modules.pop(0)
        if module not in found:
            found[module] = None
            modules += [target for node in our_imports(ast.parse(source(module))) for target in targets(node)]
    return list(found)


def source(module: str) -> str:
    return file_of(module).read_text(encoding="utf-8")


def file_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)


def flat(module: str) -> str:
    return FILES.get(module, module.replace(".", "_"))


def our_imports(tree: ast.AST) -> list[ast.ImportFrom]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [node for node in nodes if node.module is not None and node.module.partition(".")[0] == "rmt"]


def targets(node: ast.ImportFrom) -> list[str]:
    """The modules that one import statement loads: for `from rmt.ops import choice`, rmt.ops.choice."""
    assert node.module is not None
    return [f"{node.module}.{name.name}" if is_module(node.module, name.name) else node.module for name in node.names]


def is_module(package: str, name: str) -> bool:
    file = file_of(package)
    if file.name != "__init__.py":
        return False
    return (file.parent / f"{name}.py").exists() or (file.parent / name / "__init__.py").exists()


def rewrite(text: str) -> str:
    """The text with our imports made relative and flat, those by name included."""
    lines = text.splitlines()
    for node in sorted(our_imports(ast.parse(text)), key=lambda node: -node.lineno):
        assert node.end_lineno is not None
        lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in relative(node)]
    text = "\n".join(lines) + "\n"
    return re.sub(
        r"importlib\.import_module\((.+?)\)(?=[,)\n])",
        r'importlib.import_module("." + (\1).replace(".", "_"), __package__)',
        text,
    )


def relative(node: ast.ImportFrom) -> list[str]:
    lines = []
    for name, target in zip(node.names, targets(node), strict=True):
        renamed = f" as {name.asname}" if name.asname else ""
        if target == node.module:
            lines.append(f"from .{flat(target)} import {name.name}{renamed}")
        else:
            lines.append(f"from . import {flat(target)} as {name.asname or name.name}")
    return lines


def add_manifest(text: str, modules: list[str]) -> str:
    """Name every file, so that transformers copies them all: it follows `from .file import`, early 5.x one step."""
    lines = [f"    from .{flat(module)} import *" for module in modules if module not in FILES]
    return "\n".join([text.rstrip(), "", "if False:  # transformers copies the files named here", *lines, ""])
