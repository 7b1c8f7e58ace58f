"""What the layout promises: links, checkers that see every folder, short files, a light public API."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import sostenuto
from sostenuto import __all__ as public

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("envs", "runtime", "sandbox", "scheduler", "tools", "trainer")
MOST_LINES = 400


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def tracked(*patterns: str) -> list[Path]:
    """Files of the tree, as git knows them; every file where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_is_reached_by_a_relative_link(folder: str):
    link = ROOT / "src" / "sostenuto" / folder
    assert link.readlink() == Path("../..") / folder
    assert (ROOT / folder / "__init__.py").is_file()


def test_no_package_stands_at_the_top_without_a_link():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tests", "benchmarks", "examples"} == set(FOLDERS)


def test_the_type_checker_is_given_every_link():
    include = project()["basedpyright"]["include"]
    assert {f"src/sostenuto/{folder}" for folder in FOLDERS} | {"src/sostenuto", "tests"} <= set(include)


def test_no_bare_import_of_a_folder_is_allowed():
    lint = project()["ruff"]["lint"]
    assert set(FOLDERS) <= set(lint["flake8-tidy-imports"]["banned-api"])


def test_files_are_short():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked("*.py")
        if path.relative_to(ROOT).parts[0] not in {"tests", "benchmarks"}
        and (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_every_module_says_what_it_is():
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked("*.py")
        if path.relative_to(ROOT).parts[0] in {*FOLDERS, "src"}
        and path.read_text().strip()
        and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def loaded_by(statement: str) -> set[str]:
    """Modules that a fresh interpreter has after the statement."""
    code = f"{statement}\nimport sys\nsys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_importing_the_package_loads_nothing_else():
    assert {name for name in loaded_by("import sostenuto") if name.startswith("sostenuto.")} == set()


def test_the_public_api_is_complete():
    tree = ast.parse(Path(sostenuto.__file__).read_text())
    typed = [
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sostenuto.")
        for alias in node.names
    ]
    assert sorted(map(str, typed)) == sorted(public)
    for name in public:
        assert getattr(sostenuto, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Runtme'"):
        _ = sostenuto.Runtme  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


@pytest.mark.parametrize(
    "statement",
    [
        "import sostenuto.runtime.runtime",
        "import sostenuto.runtime.tool_process",
        "import sostenuto.envs.worker",
        "import sostenuto.trainer.client, sostenuto.trainer.buffer",
        "import sys\nfrom typer.testing import CliRunner\nfrom sostenuto.runtime.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
    ],
)
def test_torch_is_not_loaded_by(statement: str):
    assert loaded_by(statement) & {"torch", "transformers", "ray", "docker"} == set()


def test_no_path_of_this_machine_is_in_the_tree():
    here = [f"{place}/".encode() for place in (ROOT, sys.prefix)]
    found = [
        path for path in tracked() if not path.is_symlink() and any(p in path.read_bytes() for p in here)
    ]
    assert found == []
