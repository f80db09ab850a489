"""`make docs`: builds the site strictly, and looks whether it is whole.

A warning of the builder is an error: a link or an anchor that leads nowhere, an argument in a docstring that the
function has not. Then every public name has an entry, no page loads anything from another host, and five pages open in
a browser, where there is one, without an error of their scripts, in the colours that are asked for, with the list of
versions.

The pages of a release are in a folder of its number, site/0.1.0/, and folders of others stay: a reader chooses among
those that site/versions.json lists, in the format of mike, and the address without a number leads to the newest.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import zlib
from pathlib import Path

from accel_trainer import __version__
from tests.documents.reference import public_names, write_pages

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
PAGES = SITE / __version__
_BUILT = SITE / "built"
"""Where the builder writes: it cleans the folder, and so the pages of other releases."""
OPENED = {
    "": "accel-trainer",
    "quickstart/": "Quickstart",
    "compatibility/": "What works where",
    "configuration/": "Configuration",
    "reference/accelerator/": "Accelerator",
}
"""Pages that a browser opens, with their titles."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def build(builder: str) -> None:
    """Build the pages of this version anew, and list all versions that are there."""
    write_pages()
    finished = subprocess.run(
        [builder, "build", "--clean", "--strict"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    output = finished.stdout + finished.stderr
    if finished.returncode != 0 or "griffe:" in output or "Warning" in output:
        sys.exit(f"{output}\nThe site has the faults above (exit code {finished.returncode}).")
    shutil.rmtree(PAGES, ignore_errors=True)
    _BUILT.rename(PAGES)
    list_versions(SITE)


def list_versions(site: Path) -> None:
    """Write the list of the versions whose pages are in a site, the newest first, and a way to the newest."""
    found = [folder.name for folder in site.iterdir() if (folder / "objects.inv").is_file()]
    found.sort(key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    entries = [{"version": name, "title": name, "aliases": ["latest"] if name == found[0] else []} for name in found]
    (site / "versions.json").write_text(json.dumps(entries, indent=2))
    (site / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={found[0]}/">\n')


def missing_names() -> list[str]:
    """Return the public names without an entry in the site's inventory, that of Sphinx's format."""
    packed = (PAGES / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = {line.split(" ", 1)[0] for line in zlib.decompress(packed).decode().splitlines()}
    return [path for named in public_names().values() for path in named if path not in entries]


def foreign_resources() -> list[str]:
    """Return what pages load from other hosts; links that a reader follows are none."""
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(https?://[^\"\s>]+)")
    return [
        f"{page.relative_to(SITE)}: {url}" for page in PAGES.rglob("*.html") for url in loads.findall(page.read_text())
    ]


def open_page(url: str, title: str, browser: str) -> str:
    """Open a page and return what is wrong with it, or an empty string."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=3000", "--dump-dom", url]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    errors = [line for line in finished.stderr.splitlines() if "CONSOLE" in line]
    heading = re.search(r"<h1[^>]*>(.*?)<", finished.stdout, re.DOTALL)
    if finished.returncode != 0 or errors:
        return f"{url}: exit code {finished.returncode}, {errors}"
    if heading is None or heading[1].strip() != title:
        return f"{url}: its heading is {heading and heading[1]!r}, not {title!r}"
    if (
        not re.search(r'<html[^>]* class="[^"]*\bjs\b', finished.stdout)
        or "data-md-color-scheme" not in finished.stdout
    ):
        return f"{url}: its scripts did not run"
    if 'class="md-version"' not in finished.stdout:
        return f"{url}: it offers no choice of versions"
    return ""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


def browse(browser: str) -> list[str]:
    """Serve the site to a browser, and return what is wrong."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = f"http://127.0.0.1:{server.server_port}/{__version__}"
    try:
        found = [open_page(f"{pages}/{path}", title, browser) for path, title in OPENED.items()]
    finally:
        server.shutdown()
        server.server_close()
    return [each for each in found if each]


def main() -> None:
    """Build, check, and say what stands."""
    build(sys.argv[1])
    problems = [f"no entry of {path}" for path in missing_names()]
    problems += [f"loaded from elsewhere: {each}" for each in foreign_resources()]
    problems += browse(CHROMIUM) if CHROMIUM else []
    if problems:
        sys.exit("\n".join(problems))
    names = sum(map(len, public_names().values()))
    opened = f"{len(OPENED)} opened in a browser" if CHROMIUM else "no browser was found to open them"
    print(f"site/{__version__}/: {len(list(PAGES.rglob('index.html')))} pages, {names} public names; {opened}")


if __name__ == "__main__":
    main()
