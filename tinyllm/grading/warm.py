"""Imported last by the fork server: work that every run would otherwise repeat."""

import gc
import importlib
import sys

from _pytest.config import default_plugins
from hypothesis.internal.constants_ast import is_local_module_file

from tinyllm.grading import handover, recorder, worker

__all__ = ["handover", "recorder", "worker"]
for plugin in default_plugins:
    importlib.import_module(f"_pytest.{plugin}")
for module in list(sys.modules.values()):
    if isinstance(file := getattr(module, "__file__", None), str):
        is_local_module_file(file)  # reads the disk once; Hypothesis caches the answer
gc.freeze()  # pytest collects garbage twice at its end: what is here is none
