"""`make release-check`: what would be uploaded, installed into an empty environment and used as a stranger would.

Wheel and sdist are built from a copy of the checkout. The wheel is installed from wheels alone, so nobody needs a
compiler; `pip check`, the versions, a user's script on one and on two processes and a user's code under `mypy --strict`
follow; then the same script against what pip builds from the sdist.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".compat", ".*_cache", "__pycache__", "build", "dist", "*.egg-info", "site"
)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command without the checkout on its path, and return what it printed; its failure ends the check."""
    words = [str(word) for word in command]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(words, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        sys.exit(f"{' '.join(words)}\n{finished.stdout}{finished.stderr}\nexit code {finished.returncode}")
    return finished.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the sdist of the checkout; the wheel is built from the sdist, as an upload's would be."""
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_COPIED)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def check_versions(python: Path, wheel: Path, folder: Path) -> str:
    """Return the version that the wheel's name, the metadata, the module, the command and the changelog agree on."""
    code = "import accel_trainer, importlib.metadata as m; print(accel_trainer.__version__, m.version('accel-trainer'))"
    module, metadata = run(python, "-c", code, cwd=folder).split()
    command = run(python.with_name("accel-trainer"), "--version", cwd=folder).split()[1]
    changelog = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    found = {
        "wheel": wheel.name.split("-")[1], "metadata": metadata, "__version__": module,
        "accel-trainer --version": command, "CHANGELOG.md": changelog[1] if changelog else "no section",
    }  # fmt: skip
    if len(set(found.values())) != 1:
        sys.exit(f"these versions should be one: {found}")
    return module


def use(python: Path, folder: Path, version: str) -> None:
    """Run the script of a user on one process, and by the launcher on two."""
    # A compiler that fails stands for one that is not there.
    environment = {"CC": "false", "CXX": "false", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    shutil.copy(HERE / "smoke.py", folder)
    launched = (python.with_name("accel-trainer"), "launch", "--cpu", "--num_processes", "2")
    for name, command in {"one": (python,), "two": launched}.items():
        printed = run(*command, "smoke.py", folder / name, cwd=folder, **environment)
        if f"ok {version}" not in printed:
            sys.exit(f"the script ended without its last line on {name} process(es):\n{printed}")
        shutil.rmtree(folder / name)


def check_types(python: Path, folder: Path) -> None:
    """Check a user's module against the types of the installed package."""
    shutil.copy(HERE / "consumer.py", folder)
    # `implicit reexport` as in pyproject.toml: torch documents names that its packages import without listing them.
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = True\n"
        "[mypy-torch.*]\nimplicit_reexport = True\n"
        "[mypy-transformers.*,yaml.*,tqdm.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
    )
    run(sys.executable, "-m", "mypy", "--python-executable", python, "consumer.py", cwd=folder)


def main() -> None:
    """Run every step, and print what stands."""
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        print(
            f"built {wheel.name} ({wheel.stat().st_size >> 10} KiB) and {sdist.name} ({sdist.stat().st_size >> 10} KiB)"
        )
        venv.create(folder / "environment", with_pip=True)
        python = folder / "environment" / "bin" / "python"
        constraints = ("--constraint", ROOT / "constraints.txt")
        run(python, *PIP, "install", "--only-binary", ":all:", *constraints, wheel, cwd=folder)
        print(f"installed without a compiler; pip check: {run(python, '-m', 'pip', 'check', cwd=folder).strip()}")
        version = check_versions(python, wheel, folder)
        use(python, folder, version)
        print(f"{version}: the wheel trains on one process and on two")
        check_types(python, folder)
        print("a user's module passes mypy --strict")
        run(python, *PIP, "install", "--no-deps", "--force-reinstall", sdist, cwd=folder)
        use(python, folder, version)
        print(f"{version}: the sdist trains on one process and on two")


if __name__ == "__main__":
    main()
