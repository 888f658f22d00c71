"""Build a release into dist/ and try it in a fresh environment; nothing is uploaded.

    python scripts/release.py    # needs `build`, `twine`, the extra `docs`, packages from an index

dist/ then has the wheel, the source distribution, the bill of materials of an environment with the
wheel and its extra `unlearn` (CycloneDX), the documentation, the section of the changelog, and the
SHA-256 of all of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

from check_base_install import ROOT, Environment

DIST = ROOT / "dist"
EXTRA = "unlearn"
SMALL = (
    "data.limit={train: 600, test: 200}", "train.epochs=2", "pool.grid={epochs: [2, 3]}",
    "methods=[consensus, uniform]", "search.evaluations=4",
)  # fmt: skip
"""What makes the demo short: a release is tried, not measured."""
BILL = "cyclonedx-bom>=5,<8"


def build() -> tuple[Path, Path]:
    """Build and check wheel and source distribution."""
    shutil.rmtree(DIST, ignore_errors=True)
    done([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)])
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    done([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(source)])
    return wheel, source


def done(command: list[str]) -> None:
    """Run a program that must succeed; show what it says only if it does not."""
    found = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if found.returncode:
        raise SystemExit(f"{' '.join(command)}: {found.returncode}\n{found.stdout}{found.stderr}")


def use(wheel: Path, folder: Path) -> Environment:
    """Install the wheel into an environment of its own, and run a short demo there to its page."""
    here = Environment(folder)
    venv.create(here.place, with_pip=True)
    here.run("python", "-m", "pip", "install", "-q", f"{wheel}[{EXTRA}]")
    changes = [word for change in SMALL for word in ("--set", change)]
    here.variables |= {"HF_HUB_OFFLINE": "1", "NEGMERGE_CACHE": str(folder / "cache")}
    here.run("negmerge", "unlearn", "demo", "--out", "run", *changes)
    here.run("negmerge", "verify", "run")
    page = here.work / "run" / "report" / "index.html"
    if "consensus" not in page.read_text():
        raise SystemExit(f"{page}: does not show the method")
    return here


def bill_of_materials(here: Environment, folder: Path) -> Path:
    """List every distribution of the environment, with versions and licences."""
    tools = Environment(folder)
    venv.create(tools.place, with_pip=True)
    tools.run("python", "-m", "pip", "install", "-q", BILL)
    bill = DIST / "sbom.json"
    tools.run(
        "cyclonedx-py", "environment", here.programs / "python", "--output-reproducible",
        "--output-format", "JSON", "--output-file", bill,
    )  # fmt: skip
    named = {part["name"].lower() for part in json.loads(bill.read_text())["components"]}
    if not {"negmerge", "numpy", "torch"} <= named:
        raise SystemExit(f"{bill}: negmerge, numpy or torch is missing")
    return bill


def documentation(version: str) -> None:
    """Build the site and pack it."""
    done([sys.executable, "-m", "mkdocs", "build", "--strict"])
    with tarfile.open(DIST / f"negmerge-docs-{version}.tar.gz", "w:gz") as archive:
        archive.add(ROOT / "site", f"negmerge-docs-{version}")


def changes(version: str) -> str:
    """Return the section of the changelog about a version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## {re.escape(version)}.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"CHANGELOG.md: has no section {version}")
    return found[0]


def main() -> None:
    """Make everything; stop at the first thing that does not work."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    notes = changes(version)
    print(f"negmerge {version}: building wheel and source distribution", flush=True)
    wheel, _ = build()
    (DIST / f"changes-{version}.md").write_text(notes)
    print("building the documentation", flush=True)
    documentation(version)
    with tempfile.TemporaryDirectory(prefix="negmerge-release-") as place:
        used, tools = Path(place, "use"), Path(place, "tools")
        used.mkdir()
        tools.mkdir()
        print(f"installing {wheel.name}[{EXTRA}] and running a short demo", flush=True)
        here = use(wheel, used)
        print("listing the materials", flush=True)
        bill_of_materials(here, tools)
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(DIST.iterdir())
    ]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  dist/{path.name}")


if __name__ == "__main__":
    main()
