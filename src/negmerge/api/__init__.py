"""The functions of the public API that use several rooms: `unlearn` for models in memory, `push`.

May import every room but `cli` and `paper`; `negmerge/__init__.py` lists the whole API.
"""
