"""What an import brings with it, and what it offers."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import HAS

import posenc

CHECKING = "TYPE_CHECKING"
PACKAGES = ["posenc", *(f"posenc_{name}" for name, here in HAS.items() if here)]
NEVER = {  # package -> what importing it must not bring
    "posenc": ["torch", "jax", "matplotlib", "jaxtyping", "rich", "posenc_torch", "posenc_jax"],
    # PyTorch's compiler takes two seconds to import.
    "posenc_torch": ["jax", "posenc_jax", "matplotlib", "torch._dynamo"],
    "posenc_jax": ["torch", "posenc_torch", "matplotlib"],
}
# Nor does a call.
CALLS = {
    "posenc_torch": """
import torch
q = torch.ones(1, 2, 300, 8, requires_grad=True)
for implementation in ("chunked", "sdpa", "reference"):
    options = {"causal": True, "implementation": implementation}
    posenc_torch.attention(q, q, q, posenc.ALiBi(2), **options).sum().backward()
"""
}


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_brings_only_its_own(package):
    code = f"import sys, posenc, {package}\n{CALLS.get(package, '')}\n"
    code += f"print(*[m for m in {NEVER[package]} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_laws_on_numpy_import_no_other_framework():
    code = "import posenc, sys; from posenc.testing import check_scheme; "
    code += "check_scheme(posenc.NoPE(), frameworks=['numpy']); "
    code += "print(*{'torch', 'jax', 'array_api_strict'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_an_import_brings_what_is_slow_only_when_asked():
    """``import posenc`` imports nothing; NumPy and a scheme's file come when they are needed."""
    code = "import sys; import posenc; print(*sys.modules); posenc.attention; "
    code += "print(*sys.modules); posenc.RoPE; posenc.make('alibi', num_heads=2); "
    code += "print(*[m for m in sys.modules if m.startswith('posenc.schemes.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, used, asked = (set(line.split()) for line in done.stdout.splitlines())
    assert {m for m in first if m.startswith(("posenc", "numpy"))} == {"posenc"}
    assert not {"numpy.testing", "numpy.f2py", "array_api_compat.numpy", "pathlib"} & used
    assert {m for m in used if m.startswith("posenc.schemes.")} == {"posenc.schemes.nope"}
    others = {m for m in asked if "scalings" not in m}
    names = ["nope", "rope", "rope_of_hf", "alibi", "alibi_encoder", "alibi_interpolated", "sizes"]
    assert others == {f"posenc.schemes.{name}" for name in names}


def test_a_type_checker_sees_the_names_of_posenc():
    """They are imported when they are asked for, so each is named in two places."""
    tree = ast.parse(Path(posenc.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == CHECKING)
    seen = {alias.name: n.module for n in block.body for alias in n.names}
    assert seen == {name: f"posenc.{home}" for name, home in posenc._HOME_OF.items()}
    assert sorted(seen) == posenc.__all__


def test_what_a_type_checker_sees_is_what_is_imported():
    """Schemes are imported when they are asked for, so each is named in two places."""
    tree = ast.parse(Path(posenc.schemes.__file__).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == CHECKING)
    seen = [(n.module, alias.name) for n in block.body for alias in n.names]
    ours = {(module, name) for module, name in seen if module.startswith("posenc.schemes.")}
    public = set(posenc.schemes.__all__) - {"catalogue", "make"}
    modules = posenc.schemes.MODULES
    assert ours == {(f"posenc.schemes.{modules[name]}", name) for name in public}
    assert public <= set(dir(posenc.schemes))
    assert set(posenc.__all__) <= set(dir(posenc))


def test_a_scheme_that_is_not_on_top_is_told_where_it_is():
    with pytest.raises(AttributeError, match=r"'FoX'; it is posenc\.schemes\.FoX"):
        _ = posenc.FoX
    with pytest.raises(AttributeError, match=r"'RoPe' \(did you mean 'RoPE'\?\)"):
        _ = posenc.RoPe
    with pytest.raises(AttributeError, match=r"'Fox' \(did you mean 'FoX'\?\)"):
        _ = posenc.schemes.Fox


def modules():
    for package in PACKAGES:
        root = importlib.import_module(package)
        for found in pkgutil.walk_packages(root.__path__, f"{package}."):
            yield found.name


@pytest.mark.parametrize("name", list(modules()))
def test_every_module_imports(name):
    """Also as ``import a.b as c``, which a function of the module's name in ``a`` would answer."""
    try:
        module = importlib.import_module(name)
        assert module.__doc__
        scope = {}
        exec(f"import {name} as found", scope)
        assert scope["found"] is module
    except ModuleNotFoundError as error:
        # An adapter of a library imports it: of one that an audit knows, or of its own name.
        library = error.name.split(".")[0]
        adapts = ".audit." in name or name.endswith(f".{library}")
        absent = adapts and importlib.util.find_spec(library) is None
        if library not in ("matplotlib", "rich") and not absent:
            raise
        pytest.skip(f"{error.name} is optional and not installed")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names(package):
    root = importlib.import_module(package)
    assert root.__all__ == sorted(root.__all__)
    assert len(root.__all__) <= {"posenc": 29}.get(package, 20)
    assert all(hasattr(root, name) for name in root.__all__)
    assert all(getattr(root, name).__doc__ for name in root.__all__ if name != "IMPLEMENTATIONS")


def test_public_modules_are_attributes():
    code = "import posenc; posenc.presets.llama; posenc.weights.t5; posenc.positions.grid"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'posenc' has no attribute 'preset'"):
        _ = posenc.preset


FOR_BACKENDS = {
    "posenc", "posenc.audit", "posenc.audit.adapters", "posenc.audit.readers", "posenc.backend",
    "posenc.hf", "posenc.positions", "posenc.presets", "posenc.probe", "posenc.schemes",
    "posenc.study", "posenc.testing",
}  # fmt: skip


@pytest.mark.parametrize("package", [*PACKAGES[1:], "posenc_keras"])
def test_a_backend_imports_only_what_is_documented_for_backends(package):
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    for file in Path(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            ours = {name for name in names if f"{name}.".startswith("posenc.")}
            assert ours <= FOR_BACKENDS, f"{file}:{node.lineno}"


def test_schemes_are_public():
    for maker in posenc.catalogue().values():
        if hasattr(posenc, maker.__name__):
            assert maker.__name__ in posenc.__all__


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "array"),
    [("posenc_torch", "torch.zeros(1, 2, 5, 8)"), ("posenc_jax", "jax.numpy.zeros((1, 2, 5, 8))")],
)
def test_a_framework_has_its_operations_without_an_import_of_its_backend(framework, array):
    """So no speed depends on what else a program imports."""
    module = framework.replace("posenc_", "")
    code = f"import sys, {module}, posenc; q = {array}; posenc.attention(q, q, q, posenc.RoPE(8)); "
    code += f"assert '{framework}' in sys.modules; from array_api_compat import array_namespace; "
    code += "from posenc.contract.operations import operations_of; "
    code += "assert operations_of(array_namespace(q)).hold is not None"
    subprocess.run([sys.executable, "-c", code], check=True)
