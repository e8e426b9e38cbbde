"""Who may import whom, read from the source; and that triton and flash-attn are optional."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nanovllm"

# Each may import itself and what is further left.
ORDER = ("utils", "kernels", "layers", "models", "engine", "llm")
# Plain data at the top of the package: importable by the engine, and knowing none of it.
BESIDE_MODELS = {"config", "sampling_params", "outputs", "requests"}
TORCH_FREE = ("engine.sequence", "engine.scheduler", "engine.block_manager")
OPTIONAL = {"triton", "flash_attn", "flash_attn_3"}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def level(module):
    """Place in ORDER; scripts and everything else at the top of the package come last."""
    top = module.split(".")[0]
    if top == "errors":
        return 0
    if top in BESIDE_MODELS:
        return ORDER.index("models")
    return ORDER.index(top) if top in ORDER else ORDER.index("llm")


def imports_of(path, top_level_only=False):
    """Names of the modules that a file imports, except for type checking only."""

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if top_level_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                for alias in child.names:
                    submodule = f"{child.module}.{alias.name}"
                    is_module = submodule.removeprefix("nanovllm.") in MODULES
                    yield submodule if is_module else child.module
            else:
                yield from visit(child)

    return set(visit(ast.parse(path.read_text(encoding="utf-8"))))


def own_imports(path, **options):
    """The package's modules that a file imports, as keys of MODULES."""
    names = {name.removeprefix("nanovllm.") for name in imports_of(path, **options)}
    return names & MODULES.keys() - {""}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    for imported in own_imports(MODULES[module]):
        assert level(imported) <= level(module), f"{module} imports {imported}"


def test_modules_have_no_import_cycle():
    graph = {name: own_imports(path, top_level_only=True) for name, path in MODULES.items()}
    done, trail = set(), []

    def visit(name):
        assert name not in trail, f"cycle: {' -> '.join([*trail, name])}"
        if name in done:
            return
        trail.append(name)
        for imported in sorted(graph[name]):
            visit(imported)
        trail.pop()
        done.add(name)

    for name in graph:
        visit(name)


@pytest.mark.parametrize("start", TORCH_FREE)
def test_scheduling_knows_no_torch(start):
    seen, queue = set(), [start]
    while queue:
        module = queue.pop()
        if module in seen:
            continue
        seen.add(module)
        outside = {name.split(".")[0] for name in imports_of(MODULES[module])}
        assert not outside & {"torch", "triton", "transformers"}, f"{start} needs {module}"
        queue.extend(own_imports(MODULES[module]))


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] != "kernels"])
def test_optional_packages_and_kernels_are_imported_on_selection_only(module):
    names = imports_of(MODULES[module], top_level_only=True)
    assert not {name.split(".")[0] for name in names} & OPTIONAL
    assert not [name for name in names if name.startswith("nanovllm.kernels")]


WITHOUT_OPTIONAL = """
import importlib, sys
for name in {blocked}:
    sys.modules[name] = None  # importing it raises ImportError, as if it were not installed
for name in {modules}:
    importlib.import_module("nanovllm." + name if name else "nanovllm")
import torch
from nanovllm.layers.attention import select_backend
from nanovllm.layers.ops import select_ops, triton_ops
cpu = torch.device("cpu")
assert select_backend("auto", cpu, torch.float32, 64, 256).name == "reference"
assert select_ops(torch.device("cuda")).name == "torch"
try:
    select_backend("triton", cpu, torch.float32, 64, 256)
except ValueError as error:
    assert "triton is not installed" in str(error), error
else:
    raise SystemExit("triton was selected without triton")
"""


def test_everything_but_the_kernels_imports_without_triton_and_flash_attn():
    """Upstream cannot be imported where flash-attn does not build (N30)."""
    modules = [
        name
        for name in MODULES
        if name.split(".")[0] in {*ORDER, *BESIDE_MODELS, "errors"} - {"kernels"}
    ]
    code = WITHOUT_OPTIONAL.format(blocked=sorted(OPTIONAL), modules=modules)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_an_engine_runs_without_triton_and_flash_attn():
    """With both packages blocked, the demo model still answers, from the reference backend."""
    code = (
        WITHOUT_OPTIONAL.format(blocked=sorted(OPTIONAL), modules=[""])
        + """
import nanovllm
with nanovllm.LLM(nanovllm.DEMO_MODEL, device="cpu") as llm:
    chat = [{"role": "user", "content": "list all prime numbers within 100"}]
    prompt = llm.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    greedy = nanovllm.SamplingParams(temperature=0, max_tokens=256)
    print(llm.engine.workers.attention.name, llm.generate(prompt, greedy)[0]["text"])
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.stdout.startswith("reference 2, 3, 5, 7, 11"), done.stderr
    assert done.stdout.strip().endswith("83, 89, 97")
