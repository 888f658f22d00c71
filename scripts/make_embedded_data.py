"""Make the embedded data set from the whole of Fashion-MNIST.

    python scripts/make_embedded_data.py FOLDER OUT

FOLDER has train.parquet and test.parquet with the columns image and label. Each class gives the
same number of images, chosen by a fixed seed, and their pixels are unchanged.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SIZES = {"train": 8_000, "test": 2_500}
SEED = 0

# Other versions choose the same images, but may pack the same pixels into other bytes.
MADE_WITH = {"pillow": "13.0.0", "pyarrow": "26.0.1"}


def chosen(labels: np.ndarray, size: int) -> np.ndarray:
    """Places of the subset, in the order of the full set."""
    rng = np.random.default_rng(SEED)
    classes = np.unique(labels)
    each = size // len(classes)
    places = [rng.choice(np.flatnonzero(labels == c), each, replace=False) for c in classes]
    return np.sort(np.concatenate(places))


def smaller(png: bytes) -> bytes:
    """The same pixels in as few bytes as Pillow can."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def subset(path: Path, size: int) -> pa.Table:
    """The rows to embed, with the class names in the table's metadata as `datasets` does."""
    full = pq.read_table(path)
    part = full.take(chosen(full["label"].to_numpy(), size))
    cells = [{"bytes": smaller(cell["bytes"]), "path": None} for cell in part["image"].to_pylist()]
    info = json.loads(full.schema.metadata[b"huggingface"])
    kept = {"info": {"features": {name: info["info"]["features"][name] for name in FIELDS}}}
    arrays = [pa.array(cells, FIELDS["image"]), part["label"].combine_chunks()]
    schema = pa.schema(
        list(FIELDS.items()), metadata={"huggingface": json.dumps(kept, sort_keys=True)}
    )
    return pa.Table.from_arrays(arrays, schema=schema)


FIELDS = {
    "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    "label": pa.int64(),
}


def main(folder: Path, out: Path) -> None:
    """Write both splits."""
    out.mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        table = subset(folder / f"{split}.parquet", size)
        # PNG bytes do not compress again; a dictionary of distinct pictures would only cost.
        pq.write_table(table, out / f"{split}.parquet", compression="none", use_dictionary=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
