// Rows of DIM halves in shared memory, for ldmatrix. Macro: DIM. Include device.h first.
#pragma once

// Byte offset of a 16-byte unit of a row. Units are permuted within a row, so that eight rows of
// one unit fall into different banks.
FN int swizzle(int row, int unit) { return row * (DIM * 2) + ((unit ^ (row & 7)) * 16); }

// The offset `units` units further in the row; `units` has no bit below or at one that differs
// between lanes.
FN int advance_units(int at, int units) { return (at ^ (units % 8 * 16)) + units / 8 * 128; }

FN i64 offset64(int index, int stride) { return (i64)((u64)(u32)index * (u32)stride); }        // both are >= 0
