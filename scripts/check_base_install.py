"""Install the wheel without extras into an environment of its own, and use it there.

    python scripts/check_base_install.py             # needs `build`, and packages from an index
    python scripts/check_base_install.py --record    # writes benchmarks/results/base_install.md
    python scripts/check_base_install.py --merge-verbs    # also on macOS and Windows

Merging, applying, inspecting, converting and verifying must work without torch; whatever needs an
extra must say so in one line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/results/base_install.md"
HEAVY = ("torch", "torchvision", "datasets", "pandas", "scikit-learn", "matplotlib", "transformers")
LISTED = ("rules", "selectors", "metrics", "criteria", "scenarios", "datasets", "recipes", "tables")
UNLEARN = "pip install 'negmerge[unlearn]'"

MAKE_FILES = """
import numpy as np
from pathlib import Path
from safetensors.numpy import save_file
rng = np.random.default_rng(0)
def weights(): return {n: rng.standard_normal((64, 64)).astype(np.float32) for n in ("a", "b")}
base = weights()
save_file(base, "base.safetensors")
for k in range(3):
    change = weights()
    save_file({n: base[n] + np.float32(0.1) * change[n] for n in base}, f"model{k}.safetensors")
Path("weights.pt").write_bytes(b"PK\\x03\\x04")
Path("run").mkdir()
Path("run/recipe.yaml").write_text("seed: 1\\n")
"""

CHECK_RESULT = """
import numpy as np
from safetensors.numpy import load_file
base, out = load_file("base.safetensors"), load_file("out.safetensors")
pool = [load_file(f"model{k}.safetensors") for k in range(3)]
for name, old in base.items():
    changes = np.stack([model[name].astype(np.float64) - old for model in pool])
    agreed = np.abs(np.sign(changes).sum(0)) == len(pool)
    wanted = np.where(agreed, old - 0.5 * changes.mean(0), old)
    np.testing.assert_allclose(out[name], wanted, rtol=1e-6, atol=1e-7)
    assert agreed.any() and (out[name] == old)[~agreed].all()
"""

# Rooms whose modules work without extras, but for those that are about torch.
IMPORT_ALL = """
import pkgutil, sys
from importlib import import_module
import negmerge
from negmerge.extras import MissingExtraError
FREE = ("checkpoints", "cli", "errors", "extras", "merging", "plugins", "registry", "support",
        "vectors")
ABOUT_TORCH = {"negmerge.merging.torch_computation", "negmerge.vectors.module"}
found = {"imported": 0, "needing an extra": 0}
for module in pkgutil.walk_packages(negmerge.__path__, "negmerge.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        import_module(module.name)
        found["imported"] += 1
    except MissingExtraError:
        free = module.name.split(".")[1] in FREE and module.name not in ABOUT_TORCH
        assert not free, f"{module.name} needs an extra"
        found["needing an extra"] += 1
assert not {"torch", "pandas", "sklearn"} & sys.modules.keys()
print(found["imported"], found["needing an extra"])
"""

PUBLIC = """
import negmerge as nm
for name in ("unlearn", "run", "report"):
    try:
        getattr(nm, name)
    except nm.NegMergeError as error:
        assert str(error).endswith("pip install 'negmerge[unlearn]'"), error
    else:
        raise AssertionError(f"nm.{name} is there without its extra")
"""


class Environment:
    """A virtual environment and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.place, self.work = folder / "environment", folder / "work"
        self.programs = self.place / ("Scripts" if os.name == "nt" else "bin")
        self.work.mkdir()
        # Nothing of the environment that runs this script may be found from there.
        self.variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.variables |= {"NUMBA_CACHE_DIR": str(folder / "compiled")}

    def run(self, *command: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, which must end with this code."""
        program, *arguments = map(str, command)
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.work,
            env=self.variables,
            capture_output=True,
            text=True,
        )
        if done.returncode != code:
            raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n"
                             f"{done.stdout}{done.stderr}")  # fmt: skip
        return done

    def refused(self, *arguments: str) -> None:
        """Run a verb that needs an extra: one line must say which."""
        told = self.run("negmerge", *arguments, code=2).stderr
        if told.count("\n") != 1 or not told.startswith("error: ") or UNLEARN not in told:
            raise SystemExit(f"negmerge {' '.join(arguments)}: wanted one line with {UNLEARN}; "
                             f"got {told!r}")  # fmt: skip

    def size(self) -> int:
        """Bytes of all files."""
        files = (path for path in self.place.rglob("*") if path.is_file() and not path.is_symlink())
        return sum(path.stat().st_size for path in files)


def check(folder: Path, merge_verbs: bool) -> dict[str, str]:
    """Build, install, use; what was measured, by name.

    Args:
        folder: an empty folder.
        merge_verbs: stop after the verbs that every system has.
    """
    command = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = (folder / "dist").glob("*.whl")
    here = Environment(folder)
    measured = {"wheel": f"{wheel.stat().st_size / 1e6:.1f} MB"}
    begun = time.perf_counter()
    venv.create(here.place, with_pip=True)
    here.run("python", "-m", "pip", "install", "--disable-pip-version-check", "-q", wheel)
    measured["environment made and installed"] = f"{time.perf_counter() - begun:.1f} s"
    measured["size of the environment"] = f"{here.size() / 1e6:.0f} MB"
    installed = json.loads(here.run("python", "-m", "pip", "list", "--format=json").stdout)
    measured["distributions"] = str(len(installed))
    heavy = {one["name"].lower() for one in installed} & set(HEAVY)
    if heavy:
        raise SystemExit(f"the base install brings {', '.join(sorted(heavy))}")

    here.run("python", "-c", MAKE_FILES)
    merging = ["merge", "base.safetensors", *(f"model{k}.safetensors" for k in range(3))]
    merging += ["-o", "patch.safetensors"]
    for title in ("first merge, which compiles", "second merge"):
        begun = time.perf_counter()
        here.run("negmerge", *merging)
        measured[title] = f"{time.perf_counter() - begun:.1f} s"
    found = json.loads(here.run("negmerge", "inspect", "patch.safetensors", "--json").stdout)
    assert (found["kind"], found["n"]) == ("patch", 3), found
    here.run("negmerge", "apply", "base.safetensors", "patch.safetensors", "--negate", "0.5",
             "-o", "out.safetensors")  # fmt: skip
    here.run("python", "-c", CHECK_RESULT)
    here.run("negmerge", "convert", "out.safetensors", "-o", "again.safetensors")
    for kind in LISTED:
        here.run("negmerge", "list", kind)
    if merge_verbs:
        return measured
    told = here.run("negmerge", "verify", "run", code=2).stderr
    assert "manifest.json" in told, told

    here.refused("unlearn")
    here.refused("report", "run")
    here.refused("reproduce", "T2")
    here.refused("list", "rivals")
    here.refused("list", "models")
    here.refused("convert", "weights.pt", "--trust", "-o", "weights.safetensors")
    here.run("python", "-c", PUBLIC)
    imported, needing = here.run("python", "-c", IMPORT_ALL).stdout.split()
    measured["modules imported without extras"] = imported
    measured["modules that name their extra"] = needing
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--merge-verbs", action="store_true", help="only what every system has")
    given = parser.parse_args()
    record = given.record
    with tempfile.TemporaryDirectory(prefix="negmerge-base-") as folder:
        measured = check(Path(folder), given.merge_verbs)
    rows = "\n".join(f"| {name} | {value} |" for name, value in measured.items())
    text = f"| base install, without extras | |\n|---|--:|\n{rows}\n"
    print(text, end="")
    if record:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from machine import describe

        command = "`python scripts/check_base_install.py --record`"
        RECORD.write_text(f"# The base install, measured\n\n{command} on {describe()}.\n\n{text}")


if __name__ == "__main__":
    main()
