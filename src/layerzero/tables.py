"""Choices made ahead of time: dispatch tables, lockfiles, bound kernels, planned blocks."""

from .models.block import Block, Either, Glue, Stage
from .plan.bake import bind
from .plan.block import plan_block
from .plan.force import table_in_force, use_table
from .plan.lockfile import check_lockfile, use_lockfile, write_lockfile
from .plan.solver import solve
from .plan.table import Table

__all__ = ["Block", "Either", "Glue", "Stage", "Table", "bind", "check_lockfile", "plan_block",
           "solve", "table_in_force", "use_lockfile", "use_table", "write_lockfile"]
