"""Executors run steps: in this process, in local processes, or on a Ray cluster.

◄ ADD AN EXECUTOR. Subclass `Executor`. Each worker makes the scenario once, with its data and
networks; steps and their results are small and can be pickled. A step that runs twice writes the
same bytes twice, so that an executor may repeat a step whose worker was lost.
"""

from negmerge.runs.cores import Cores
from negmerge.runs.executors.base import Executor
from negmerge.runs.executors.in_process import InProcess, OnlyWorker
from negmerge.runs.executors.local import LocalProcesses, count_processes

__all__ = ["Cores", "Executor", "InProcess", "LocalProcesses", "OnlyWorker", "count_processes"]
