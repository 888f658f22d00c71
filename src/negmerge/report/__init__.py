"""What people look at: tables, figures, the page.

`negmerge.report` is both this package and the function of the public API.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Report(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from negmerge.report.page import report

        return report(*args, **options)


sys.modules[__name__].__class__ = _Report
