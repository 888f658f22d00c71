"""The methods that merged task vectors are compared with. ◄ ADD A RIVAL METHOD: one file here.

A rival is a function that takes a `Task` (`registry.py`) and changes its model in place. It may
import `training` and the rooms below, and `vision` for networks. New files are found automatically.
"""

from negmerge.rivals.registry import Rival, Task, rivals

__all__ = ["Rival", "Task", "rivals"]
