"""Helpers that every room uses, without any knowledge of models.

- `files.py` writes files and folders atomically; `reading.py` reads and parses all outside text.
- `jit.py` compiles functions; `parallel.py` runs threads.
- `progress.py` shows progress, `terminal.py` prints results, `interrupts.py` handles signals.
- `settings.py` has the base class and the value types of recipes.

May import only `errors` and `registry`. A helper that only one room needs belongs in that room.
"""
