"""Which blocks of a kernel's own code ran.

From Python 3.12 on each instruction tells once and is silent then (sys.monitoring); before, the
calls of a thread are traced until all blocks have run.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

from .own_code import Blocks

# Of one function, in one check: what the same call has not reached by then it hardly will.
MOST_ENTRIES = 64
TOOL = "layerzero: code that a kernel's checks reach"


class Tracer:
    """Records the blocks that run while it is active; `missing` has the others.

    A function that nobody has called counts for nothing: the block that calls it does.
    """

    def __init__(self, code: Mapping[int, Blocks],
                 current_call: Callable[[], Any] = lambda: None) -> None:
        self.code, self.current_call = code, current_call
        # block -> the call that reached it before any other
        self.first_calls: dict[tuple[int, int], Any] = {}
        self.missing = {number: set(blocks.lines) for number, blocks in code.items()}
        self.active = False                    # False where someone else traces
        self._entered: set[int] = set()
        self._entries: Counter[int] = Counter()

    @property
    def complete(self) -> bool:
        return next(self.unrun(), None) is None

    def count(self) -> int:
        """Returns how many blocks have not run."""
        return sum(map(len, self.missing.values()))

    def next_check(self) -> None:
        """Another call may reach what those before have not."""
        self._entries.clear()

    def unrun(self) -> Iterator[tuple[Blocks, int]]:
        """Yields the blocks that did not run, but for those that only excused ones lead to."""
        for number, missing in self.missing.items():
            if number not in self._entered:
                continue
            blocks, left = self.code[number], set(missing)
            while found := {b for b in left if any(
                    before not in left and before not in blocks.excused
                    for before in blocks.before[b])}:
                yield from ((blocks, block) for block in found)
                left -= found

    def texts(self) -> list[str]:
        """Returns where each block that did not run begins."""
        return sorted({blocks.text(block) for blocks, block in self.unrun()})

    def borders(self) -> Iterator[tuple[Blocks, int]]:
        """Yields the blocks that ran and may lead to one that did not."""
        for blocks, block in self.unrun():
            missing = self.missing[id(blocks.code)]
            yield from ((blocks, b) for b in blocks.before[block] if b not in missing)

    def conditions(self) -> set[Any]:
        """Returns the constants and names of the blocks at the border."""
        found: set[Any] = set()
        for value in (v for blocks, block in self.borders() for v in blocks.spoken[block]):
            with suppress(TypeError):          # it cannot be hashed
                found.add(value)
        return found

    def border_calls(self) -> list[Any]:
        """Returns the calls that reached a border first: what comes before it they fulfil."""
        calls = {(id(blocks.code), block): self.first_calls.get((id(blocks.code), block))
                 for blocks, block in self.borders()}
        return [call for call in calls.values() if call is not None]

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self.missing:
            yield
        elif sys.version_info >= (3, 12):
            with self._monitored():
                yield
        else:
            with self._traced():
                yield

    def _ran(self, number: int, offset: int) -> None:
        blocks = self.missing.get(number)
        if blocks is not None:
            self._entered.add(number)
            block = self.code[number].of_offset.get(offset, -1)
            if block in blocks:
                blocks.discard(block)
                self.first_calls[number, block] = self.current_call()
            if not blocks:
                del self.missing[number]

    # until Python 3.11

    @contextmanager
    def _traced(self) -> Iterator[None]:
        # a debugger's, or that of a coverage tool
        if sys.gettrace() is not None or threading.gettrace() is not None:
            yield
            return
        self.active = True
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        number = id(frame.f_code)
        if number not in self.missing or self._entries[number] >= MOST_ENTRIES:
            return None
        self._entries[number] += 1
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._ran(number, 0)
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self._ran(id(frame.f_code), frame.f_lasti)
        return self._instruction

    # from Python 3.12 on

    @contextmanager
    def _monitored(self) -> Iterator[None]:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        tool = next((n for n in (4, 3, 5, 1) if monitoring.get_tool(n) is None), None)
        if tool is None:
            yield
            return
        self.active = True
        monitoring.use_tool_id(tool, TOOL)

        def on_instruction(code: CodeType, offset: int) -> Any:
            self._ran(id(code), offset)
            return monitoring.DISABLE

        event = monitoring.events.INSTRUCTION
        monitoring.register_callback(tool, event, on_instruction)
        for number in self.missing:
            monitoring.set_local_events(tool, self.code[number].code, event)
        try:
            yield
        finally:
            for blocks in self.code.values():
                monitoring.set_local_events(tool, blocks.code, 0)
            monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)
