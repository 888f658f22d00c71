"""Models on disk and in memory: safetensors files, Hugging Face folders and state dicts.

- `checkpoint.py` opens files and folders and reads byte ranges; `state_dict.py` does the same for
  weights in memory.
- `adapter.py` opens a LoRA adapter; `adapted.py` is the model that it makes of a base, whose
  weights are computed when they are read (`low_rank.py` is the compiled loop).
- `header.py` reads and writes safetensors headers, and sets the limits of a file.
- `dtypes.py` lists the number formats and converts them exactly.
- `names.py` finds layer and component in the name of a tensor.
- `fingerprint.py` computes the fingerprint of a model; `checksum.py` is its compiled loop.
- `convert.py` converts PyTorch pickles.

This package imports only `negmerge.support` and `negmerge.errors`.
"""
