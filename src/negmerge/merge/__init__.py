"""Merging task vectors: rules, fused kernels, the streaming engine.

`negmerge.merge` is both this package and the function of the public API.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Merge(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from negmerge.merge.engine import merge

        return merge(*args, **options)


sys.modules[__name__].__class__ = _Merge
