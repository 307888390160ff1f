"""Calls as data, and trying kernels on them: replay, regret, probes in a process of their own."""

from .files.calls import read_calls, write_calls
from .machine.watchdog import run_isolated
from .spec.call import Call, TensorSpec
from .tuning.regret import replay as regret
from .tuning.workload import calls_for
from .verify.kernel.probing import probe

__all__ = ["Call", "TensorSpec", "calls_for", "probe", "read_calls", "regret", "run_isolated",
           "write_calls"]
