"""One module reads what comes from outside; damaged input gets one line from it."""

from __future__ import annotations

import ast
import importlib.util
import random
import sys
from pathlib import Path

import negmerge

SOURCE = Path(negmerge.__file__).parent
READERS = {
    "read_text", "read_bytes", "open", "fdopen", "loads", "load", "safe_load", "safe_load_all",
    "full_load", "unsafe_load", "load_all", "read_csv", "read_json", "read_parquet", "fromfile",
    "reader", "DictReader", "memmap", "safe_open", "load_file", "compose", "parse", "raw_decode",
}  # fmt: skip
"""What opens or parses a file, by the last part of its name."""
LIBRARIES = {"json", "yaml", "csv", "pd", "np", "os", "torch", "io", "pickle", "tomllib", "ast"}
ALLOWED = {
    ("plugins.py", "file.read_bytes"): "a plug-in that the user named and that was imported",
    ("runs/pipeline.py", "models.rivals[title].chosen.out.read_bytes"): "a file of the run",
    (
        "checkpoints/convert.py",
        "torch.load",
    ): "the one place that unpickles, from a checked descriptor",
    ("checkpoints/convert.py", "os.fdopen"): "of `open_regular`",
    (
        "checkpoints/pickled_module.py",
        "torch.load",
    ): "called by `convert` only; every class but those of tensors is replaced",
    ("support/files.py", "os.fdopen"): "of `open_regular`",
    ("support/files.py", "os.open"): "opens what is written, and folders",
    ("support/remote/ranges.py", "os.open"): "opens what is written",
    ("support/remote/scratch.py", "os.open"): "locks",
    ("support/remote/stores.py", "os.fdopen"): "of `open_regular`",
    ("support/remote/stores.py", "self.fs.open"): "ranges of a file of a web server",
    ("vectors/output.py", "os.open"): "opens what is written",
    ("vision/cache.py", "os.open"): "a lock",
    ("vision/cache.py", "path.open"): "opens what is written",
    ("vision/parquet.py", "files.open"): "ranges of files on the Hub",
    ("vision/parquet.py", "os.fdopen"): "of `open_regular`",
    ("vision/places.py", "os.open"): "a folder, to list it",
    ("vision/cache.py", "np.load"): "arrays of the cache, without pickles",
    ("vision/decode.py", "Image.open"): "bytes that `read_bytes` gave",
    ("vision/decode.py", "fsspec.open"): "pictures on the Hub",
    ("runs/executors/ray_bridge.py", "os.open"): "opens what is written",
    ("runs/executors/ray_bridge.py", "probe.read_bytes"): "what the driver has just written",
    ("runs/executors/worker.py", "self.path.open"): "opens what is written",
    ("merging/merge_part.py", "os.open"): "opens what is written",
    ("merging/part_file.py", "os.fdopen"): "of `open_regular`, and what is written",
    (
        "merging/part_file.py",
        "self._zip.open",
    ): "a part of a file of `open_regular`, not compressed",
    ("merging/memory.py", "np.memmap"): "memory on disk, made there",
    ("merging/memory.py", "STATUS.read_text"): "the system's own",
    ("reports/comparison.py", "yaml.safe_load"): "the text of a recipe that was read before",
    ("runs/tracking.py", "yaml.safe_load"): "the text of a recipe that was read before",
    ("reports/page.py", "drawn.read_bytes"): "a figure with the hash of the manifest",
    ("reports/page.py", "printed.read_bytes"): "a figure with the hash of the manifest",
    ("runs/caches.py", "(process / 'maps').read_bytes"): "the system's own",
    ("runs/caches.py", "os.open"): "locks",
    ("support/descriptions.py", "ast.parse"): "the source of this package",
    ("support/machine.py", "(GROUP / 'memory.current').read_text"): "the system's own",
    ("support/machine.py", "(GROUP / 'memory.max').read_text"): "the system's own",
    ("support/machine.py", "Path('/proc/meminfo').read_text"): "the system's own",
    ("support/jit.py", "Path(path).read_bytes"): "the source of a rule",
    (
        "support/jit.py",
        "Path(self._data_path(name)).read_bytes",
    ): "numba's cache, with its checksum",
    ("support/jit.py", "pickle.loads"): "numba's cache, once the checksum fits",
    (
        "scenarios/clip/pretrained.py",
        "self.embeddings.read_bytes",
    ): "checked before, when it was loaded",
    ("scenarios/clip/pretrained.py", "path.read_bytes"): "a tokenizer that was loaded before",
}
"""Who may, and why."""


def calls(path: Path) -> set[str]:
    """What a module calls that opens or parses files."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open":
            found.add("open")
        elif isinstance(called, ast.Attribute) and called.attr in READERS:
            owner = called.value.id if isinstance(called.value, ast.Name) else None
            by_method = called.attr in ("read_text", "read_bytes", "open")
            if by_method or owner in LIBRARIES:
                found.add(ast.unparse(called))
    return found


def test_nobody_else_reads_outside_files():
    seen = {
        (str(path.relative_to(SOURCE)), call)
        for path in SOURCE.rglob("*.py")
        if path != SOURCE / "support" / "reading.py"
        for call in calls(path)
    }
    assert sorted(seen - ALLOWED.keys()) == [], "call negmerge.support.reading instead"
    assert sorted(ALLOWED.keys() - seen) == [], "no longer needed"


# ------------------------------------------------------------------------------------- a short fuzz


def load_fuzz():
    path = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module
    spec.loader.exec_module(module)
    return module


def test_damaged_input_gives_a_result_or_an_error(tmp_path: Path):
    """`make fuzz` does the same with many more cases."""
    fuzz = load_fuzz()
    found, targets = {}, fuzz.targets(tmp_path)  # which imports what takes memory
    with fuzz.bounded():
        for target in targets:
            found[target.name] = fuzz.fuzz(target, 25, 1, tmp_path)
    assert len(found) >= 25
    assert {name: one.faults for name, one in found.items() if one.faults} == {}


def test_the_fuzzer_gives_the_same_cases_again():
    fuzz = load_fuzz()
    seeds = [b'{"a": [1, 2]}', b'{"b": {"c": "x"}}']
    target = fuzz.Target("any", seeds, lambda _: None, whole=True)
    one, two = ([fuzz.case_of(random.Random(k), target) for k in range(50)] for _ in range(2))
    assert one == two
