from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from accel_trainer.runtime.torch_names import SEEN_IN
from tests.release.floors import floors

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
PACKAGE_DIR: dict[str, str] = SETUPTOOLS["package-dir"]
LINKS = {"accel_trainer/integrations": "integrations", "accel_trainer/fsdp_configs": "fsdp_configs"}
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def normalized(requirement: str) -> str:
    """`"Import_Linter>=2.14"` -> `"import-linter"`."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;@]", requirement, maxsplit=1)[0]).lower()


def packages_on_disk() -> dict[str, str]:
    """Every folder that holds a Python file and has to be installed, by the name that it is imported under."""
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "accel_trainer").rglob("*.py")}
    packages = {".".join(folder.parts): folder.as_posix() for folder in folders}
    for link, target in LINKS.items():
        for path in (ROOT / target).rglob("*.py"):
            below = path.parent.relative_to(ROOT / target)
            packages[".".join((*Path(link).parts, *below.parts))] = (Path(target) / below).as_posix()
    # Folders behind a link count once, with the folder where their files are.
    return {name: folder for name, folder in packages.items() if not folder.startswith(tuple(LINKS))}


def files_in_checkout() -> set[str]:
    """The files of all packages, as they should lie in site-packages."""
    return {
        f"{name.replace('.', '/')}/{path.name}"
        for name, folder in PACKAGE_DIR.items()
        for path in (ROOT / folder).iterdir()
        if path.is_file() and path.suffix != ".pyc"
    }


def build(source: Path, output: Path, *what: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(output), str(source)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in: a build leaves folders behind that the next build would pick up."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("accel_trainer", "integrations", "fsdp_configs"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copy(ROOT / "constraints.txt", copy / "constraints.txt")
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    build(checkout, checkout / "dist", "--wheel")
    return only(checkout / "dist", "*.whl")


@pytest.fixture(scope="module")
def wheel_from_sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build(checkout, folder, "--sdist")
    with tarfile.open(only(folder, "*.tar.gz")) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    unpacked = next(path for path in folder.iterdir() if path.is_dir())
    build(unpacked, folder / "dist", "--wheel")
    return only(folder / "dist", "*.whl")


@pytest.fixture(scope="module")
def site_packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(site_packages: Path, code: str) -> str:
    """Run code with the built wheel in front of everything else, outside the checkout."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site_packages)!r})\n{code}"]
    finished = subprocess.run(command, cwd=site_packages, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_package_table_names_every_folder_on_disk():
    assert packages_on_disk() == PACKAGE_DIR
    assert sorted(SETUPTOOLS["packages"]) == sorted(PACKAGE_DIR)


def test_every_package_has_an_init():
    assert [name for name, folder in PACKAGE_DIR.items() if not (ROOT / folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_the_links_are_relative_and_intact(link: str, target: str):
    path = ROOT / link
    assert path.is_symlink(), f"{link} must be a symbolic link; with Git on Windows: git config core.symlinks true"
    assert path.readlink() == Path("..") / target
    assert path.resolve() == ROOT / target


def test_the_wheel_holds_each_file_of_the_checkout_once_and_nothing_else(wheel: Path):
    installed = [name for name in names_in(wheel) if not name.partition("/")[0].endswith(".dist-info")]
    assert sorted(installed) == sorted(files_in_checkout())
    assert {name.partition("/")[0] for name in installed} == {"accel_trainer"}
    assert len(set(names_in(wheel))) == len(names_in(wheel))


def test_the_sdist_builds_the_same_wheel(wheel: Path, wheel_from_sdist: Path):
    assert names_in(wheel_from_sdist) == names_in(wheel)


def test_the_installed_package_finds_integrations_and_its_data(site_packages: Path):
    printed = run_installed(
        site_packages,
        "import accel_trainer, accel_trainer.integrations\n"
        "from importlib.resources import files\n"
        "print(accel_trainer.__file__, accel_trainer.__version__)\n"
        "print(*(item.name for item in files('accel_trainer.fsdp_configs').iterdir()))",
    )
    where, data = printed.splitlines()
    assert where == f"{site_packages}/accel_trainer/__init__.py {PROJECT_VERSION}"
    on_disk = {path.name for path in (ROOT / "fsdp_configs").iterdir() if path.is_file()}
    assert on_disk <= set(data.split())


def test_the_command_line_entry_point_is_declared_and_callable(site_packages: Path):
    declared = only(site_packages, "*.dist-info/entry_points.txt").read_text()
    assert "[console_scripts]\naccel-trainer = accel_trainer.launch.cli:main" in declared
    assert run_installed(site_packages, "from accel_trainer.launch.cli import main; print(callable(main))") == "True\n"


def test_the_metadata_names_version_python_licence_and_extras(site_packages: Path):
    metadata = message_from_string(only(site_packages, "*.dist-info/METADATA").read_text())
    assert metadata["Version"] == PROJECT_VERSION
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"deepspeed", "dev", "examples", "test"} <= set(metadata.get_all("Provides-Extra", []))
    assert "Apache License" in only(site_packages, "*.dist-info/licenses/LICENSE").read_text()


REQUIRED = set(map(normalized, PROJECT["project"]["dependencies"]))
DECLARED = REQUIRED | {normalized(item) for extra in EXTRAS.values() for item in extra}


def test_accelerate_is_no_requirement_and_datasets_and_evaluate_come_with_the_examples():
    assert "accelerate" not in DECLARED | set(pinned())
    assert {"datasets", "evaluate"} & REQUIRED == set()
    assert {"datasets", "evaluate"} <= set(map(normalized, EXTRAS["examples"]))


IMPORT_NAMES = {"prompt-toolkit": "prompt_toolkit", "pyyaml": "yaml"}
LEFT_TO_THE_USER = {"bitsandbytes", "optuna", "peft", "pyarrow", "pydantic", "pynvml", "ray", "transformer_engine"}
"""Imported only after the user's own code has: a model's adapter, a search, Ray; DeepSpeed brings pydantic, datasets
pyarrow."""


def imported_modules() -> set[str]:
    """The top modules of other libraries that any file of the package imports, at its head or inside a function."""
    files = [path for folder in PACKAGE_DIR.values() for path in (ROOT / folder).glob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    newer = {"annotationlib"}  # of Python 3.14
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - newer - {"accel_trainer"}


def test_every_requirement_is_imported_and_every_import_is_declared():
    required = {IMPORT_NAMES.get(name, name) for name in REQUIRED}
    extras = {normalized(item).removesuffix("-skinny") for items in EXTRAS.values() for item in items}
    imported = imported_modules()
    assert required - imported == set()
    assert imported - required - extras == LEFT_TO_THE_USER


def test_the_constraints_pin_every_requirement_exactly():
    pins = pinned()
    assert pins["torch"] == "2.13.0"
    assert DECLARED - {normalized(PROJECT["project"]["name"])} - set(pins) == set()


def test_other_releases_are_tried_from_the_lowest_that_is_accepted():
    lowest, makefile = floors(*EXTRAS), (ROOT / "Makefile").read_text()
    assert all(re.fullmatch(r"\d+(\.\d+)+", version) for version in lowest.values()), lowest
    names = ("TORCHES", "TRANSFORMERS")
    torches, transformers = (re.search(rf"^{name} := (.+)$", makefile, re.M)[1].split() for name in names)
    assert torches[0].startswith(f"{lowest['torch']}.")
    assert transformers[0].startswith(f"{lowest['transformers']}.")
    assert set(SEEN_IN) >= {torches[0], torches[-1], pinned()["torch"]}


def make(*args: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *args], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)


def test_slow_matrices_go_on_after_one_that_fails_and_say_so():
    ran = make("test-slow", 'SLOW_RUNS=help\nno-such ARGS="a b"\nhelp')
    assert ran.returncode
    assert re.findall(r"^ +(\d+) +\d+ s  make (.+)$", ran.stdout, re.M) == [
        ("0", "help"), ("2", 'no-such ARGS="a b"'), ("0", "help"),
    ]  # fmt: skip
    dry = make("--dry-run", "test-slow", "NEWEST_PYTHON=/a/python")
    assert not dry.returncode, dry.stderr
    for words in ("tests.odd", "tests.loss_matrix --random 60 --returns", '"/a/python" -m venv .compat/newest'):
        assert words in dry.stdout


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "constraints.txt holds exact pins only: name==version"
    return {normalized(name): version for name, version in pairs}


PROJECT_VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "accel_trainer/__init__.py").read_text(), re.M).group(1)
