"""What each reason code means for the reader and what to do, for docs/troubleshooting.md.

A code that has neither a text here nor advice of its own fails a test, and so does a text for a
code that does not exist.
"""

from __future__ import annotations

import inspect

from layerzero import errors
from layerzero.spec.kernel import Kernel
from layerzero.spec.reason import Category, Code

OTHER = "Nothing to do: another kernel serves the call. "
KINDS = {
    Category.HARDWARE: "The kernel is made for another device.",
    Category.DTYPE: "The kernel does not take this dtype, format or scale.",
    Category.SHAPE: "The kernel does not take these sizes.",
    Category.LAYOUT: "The kernel does not take the tensor as it lies in memory.",
    Category.FEATURE: "The kernel does not have what the call asks for.",
    Category.MODE: "The kernel cannot run in the way the call is made.",
    Category.SOFTWARE: "The kernel's library is missing, or is not the one it was written for.",
    Category.POLICY: "Somebody decided so: a setting, a rule, a lock, a name in the call.",
    Category.HEALTH: "The kernel failed, here and now.",
    Category.MEMORY: "There is not enough memory for it.",
    Category.CALLER: "The call itself is wrong: `lz.errors.InvalidCall`, before any kernel runs.",
    Category.DATA: "What the tensors hold, or what came with them, contradicts itself.",
    Category.CACHE: "A remembered choice is no longer good.",
    Category.PLAN: "A dispatch table or lockfile does not fit this machine or this call.",
}

REMEDIES = {
    # hardware
    "PLATFORM_MISMATCH": OTHER + 'Move the tensors (`.to("cuda")`) if you want this kernel.',
    "VENDOR_MISMATCH": OTHER + "The library supports GPUs of another maker only.",
    "SM_TOO_OLD": OTHER + "The kernel uses instructions that came with a later GPU.",
    "SM_TOO_NEW": OTHER + "Look for a newer release of the library that knows this GPU.",
    "GPU_GENERATION_UNSUPPORTED": OTHER + "The kernel is written for another generation.",
    "TENSOR_CORE_GENERATION": OTHER + "The kernel needs tensor cores of another generation.",
    "MATMUL_IS_FAST": OTHER + "It is a detour for CPUs without arithmetic in this dtype; yours "
        "has it.",
    "CPU_ISA_MISSING": OTHER + "`lz doctor` lists the instructions that this CPU has.",
    "CUDA_BLOCK_LIMIT_EXCEEDED": "The grid of the launch would be larger than CUDA allows.",
    # dtype
    "DTYPE_UNSUPPORTED": OTHER + "To use this kernel, cast the inputs; to let LayerZero cast "
        "them, set `allow_adaptation: true`.",
    "MASK_DTYPE_UNSUPPORTED": "Pass a boolean mask, or one of the query's dtype.",
    "QUANT_FORMAT_UNSUPPORTED": "Quantize the weight to a format that the kernel reads: "
        "`lz.quantize(weight, format=...)`.",
    "SCALE_LAYOUT_MISMATCH": "Pass the scales as `lz.quantize` returns them: per row, or per "
        "group of `group_size`.",
    "KV_CACHE_DTYPE_MISMATCH": "The cache is of another dtype than the query.",
    # shape
    "HEAD_DIM_INVALID": OTHER + "Keys and values may have another head dimension than the kernel "
        "takes.",
    "HEAD_DIM_TOO_LARGE": OTHER + "torch's own kernels take any head dimension.",
    "HEAD_DIM_ALIGNMENT": OTHER + "Pad the head dimension to the multiple that is named, if you "
        "need this kernel.",
    "SEQ_LEN_UNSUPPORTED": OTHER + "The kernel is for other lengths, such as one new token.",
    "SHAPE_UNSUPPORTED": OTHER + "The message names the size and its limit.",
    "EMPTY_INPUT": OTHER + "This one takes no tensor without elements.",
    "GQA_UNSUPPORTED": OTHER + "The kernel wants as many key heads as query heads, or another "
        "group.",
    "PAGE_SIZE_UNSUPPORTED": "Make the cache with a page size that is listed: "
        '`lz.kv_cache("paged", page_size=16, ...)`.',
    # layout
    "STRIDE_LAST_DIM": "The last dimension is strided, as after a transpose.",
    "NOT_CONTIGUOUS": "Call `.contiguous()`, or leave `strict_mode` off: LayerZero copies where "
        "that pays.",
    "POINTER_ALIGNMENT": "The tensor begins in the middle of a vector, as a slice may: `.clone()` "
        "it, or leave `strict_mode` off.",
    "LAYOUT_UNSUPPORTED": 'Pass `layout="bhsd"` or `layout="bshd"`, whichever the tensors have.',
    "KV_CACHE_LAYOUT_MISMATCH": 'Say how the cache lies: `kv_layout="NHD"` or `"HND"`.',
    "RAGGED_UNSUPPORTED": "The kernel takes no nested tensors.",
    "TENSOR_SUBCLASS_UNSUPPORTED": OTHER + "Subclasses (DTensor, a wrapper) are served by kernels "
        "made of torch operations; unwrap the tensor to have the others.",
    # feature
    "MASK_UNSUPPORTED": OTHER + "If the mask is causal, say `is_causal=True` instead: more "
        "kernels serve.",
    "MASK_BROADCAST_UNSUPPORTED": OTHER + "Expand the mask to the shape that is named.",
    "CAUSAL_UNSUPPORTED": OTHER + "The kernel has no causal form for this call.",
    "CAUSAL_ALIGNMENT_UNSUPPORTED": "With fewer queries than keys, say which diagonal you mean: "
        '`causal_align="bottom_right"` for a KV cache.',
    "DROPOUT_UNSUPPORTED": OTHER + "`model.eval()` or `dropout_p=0.0` lets every kernel serve.",
    "WINDOW_UNSUPPORTED": OTHER + "The kernel has no sliding window of this kind.",
    "ALIBI_UNSUPPORTED": OTHER + "The kernel takes no slopes.",
    "SOFTCAP_UNSUPPORTED": OTHER + "The kernel caps no scores.",
    "LSE_UNSUPPORTED": OTHER + "Ask for the log-sum-exp only where you need it.",
    "SCALE_UNSUPPORTED": OTHER + "The kernel takes positive scales only, or a fixed one.",
    "FEATURE_UNSUPPORTED": OTHER + "The message names the argument; the kernel was written "
        "without it.",
    "ROPE_STYLE_UNSUPPORTED": OTHER + "The kernel rotates halves, or pairs, but not the other.",
    # mode
    "BACKWARD_UNSUPPORTED": "The kernel computes no gradient, and an input requires one.",
    "NOT_DETERMINISTIC": "`deterministic` is set, here or by `torch.use_deterministic_algorithms`.",
    "CUDA_GRAPH_UNSAFE": "Warm up before the capture (`lz.graphs`), or let another kernel serve.",
    "COMPILE_UNSUPPORTED": "Inside `torch.compile` only kernels made of torch operations serve; "
        "`lz.accelerate` and `lz.tables.bind` are ways without it.",
    "TP_INVARIANCE_REQUIRED": "The setting that asks for the same bits at every tensor-parallel "
        "size excludes it.",
    "BATCH_INVARIANCE_REQUIRED": "`batch_invariant` is set, and the kernel adds in another order "
        "where there are more rows. Only kernels that are proven to keep a row's bits serve.",
    "INVARIANCE_NOT_REQUIRED": "It computes row by row so that bits stay the same; without "
        "`batch_invariant` or `tp_invariant` others are faster.",
    "JIT_NOT_WARMED": "It compiles in the background and takes over when it is ready.",
    "SDPA_BACKEND_DISABLED": "torch's own switches are honoured.",
    # software
    "NOT_INSTALLED": "Install the package that is named if you want the kernel; nothing is "
        "installed for you, and nothing is broken without it.",
    "NOT_BUILT": "Our CPU kernels and the fast call path are compiled once for this machine.",
    "BUILD_REFUSED": "The folder or the file could have been written by somebody else.",
    "COMPILER_MISSING": "Everything works without it, at a higher cost per call.",
    "VERSION_CONFLICT": "Install a release of the library inside the range that is named.",
    "ABI_MISMATCH": "The package was compiled against another torch.",
    "IMPORT_FAILED": "Import the package in a plain Python to see the whole error; `lz doctor "
        "--deep` does that for all of them, each in a process of its own.",
    "CUDA_TOO_OLD": "Install a torch built for the CUDA that is named.",
    "TORCH_ENTRY_MISSING": "Upgrade torch: the function came with a later release.",
    "UNTESTED_ON_HARDWARE": "Try it with `backend=`; prove it with `lz verify`, or set "
        "`allow_untested`.",
    # policy
    "DENIED_BY_POLICY": "Change the rule that is named: `lz config` shows where it comes from.",
    "NOT_ALLOWED_BY_POLICY": "An `allow` rule lists others: add the kernel to it, or remove the "
        "rule.",
    "LOCKED_TO_ANOTHER": "`lz.unlock(op)`, or change the `lock` rule that is named.",
    "NOT_THE_NAMED_KERNEL": "Leave `backend=` out to let every kernel take part.",
    "STRICT_TRANSFORM_REFUSED": "`strict_mode` refuses copies and casts that you did not ask for.",
    "UNCERTIFIED": "`require_certificates` is set.",
    "CERTIFICATE_VOID": "Driver, torch or the library changed since it was proven.",
    "CERTIFICATE_REFUSED": "The file was changed, or others may write it.",
    "CERTIFICATION_FAILED": "`lz verify kernels` found it wrong with this build, torch and device.",
    "LZ_DISABLED": "Leave the `lz.disabled()` block, or unset `LAYERZERO_DISABLED`.",
    # health
    "CIRCUIT_OPEN": "It is left out for a while after it failed several times in a row; `lz "
        "doctor` names the last fault.",
    "BACKEND_DISABLED": "Start a new process after you dealt with the fault that is named.",
    "KERNEL_FAILED": "The call was served by the next kernel. If it happens again, deny the "
        "kernel and report it to its library.",
    "KERNEL_TIMEOUT": "It took longer than `call_timeout`: raise it, or deny the kernel.",
    "WRONG_RESULT": "Shape, dtype, device or number of results are not the operation's.",
    "INPUT_CHANGED": "The error is `lz.errors.InputDamaged`: nothing is answered from damaged "
        "data.",
    "DEVICE_FAULT": "An illegal access or the like; every later call on that device would fail.",
    # memory
    "MEMORY_HEADROOM_EXCEEDED": "Free memory, use smaller batches, or change `memory_headroom`.",
    "OUT_OF_MEMORY": "A kernel that needs less was tried next. If all ran out: smaller batches, a "
        "shorter context, a dtype of fewer bytes.",
    # the caller
    "WRONG_TYPE": "Pass what is named: a tensor, a number, a bool.",
    "TENSOR_UNREADABLE": "Kernels read plain strided tensors.",
    "WRONG_NDIM": "Reshape; `lz.op(name).reference.__doc__` and the reference page have the "
        "shapes.",
    "DIM_MISMATCH": "Two tensors disagree about a size that must be the same; the message names "
        "both.",
    "MIXED_DEVICES": "The tensors of one call are on several devices.",
    "MIXED_DTYPES": "The tensors of one call have several dtypes.",
    "MASK_WITH_CAUSAL": "The two together are ambiguous.",
    "MASK_BROADCAST_INVALID": "Give the mask size 1, or the full size, in every dimension.",
    "MASK_TYPE_INVALID": "Pass a boolean mask (True takes part) or one that is added to the "
        "scores.",
    "HEADS_NOT_DIVISIBLE": "The number of query heads must be a multiple of the number of key "
        "heads.",
    "LAYOUT_AMBIGUOUS": "Heads and sequence are equally long, so nothing tells them apart.",
    "LAYOUT_UNKNOWN": "Write the layout as it is listed.",
    "VALUE_OUT_OF_RANGE": "The reference page of the operation has the range of every number.",
    "MISSING_METADATA": "Pass the argument that is named; without it the call has no meaning.",
    # data, cache, plans
    "TOKENIZER_MISMATCH": "Two tokenizers were mixed: encode and decode with the same files.",
    "BLOCK_TABLE_INVALID": "The table names pages that the cache does not have; make it with "
        "`lz.kv_cache` or `lz.page_table_from_csr`.",
    "KV_METADATA_INVALID": "Lengths, offsets or scales contradict the cache; the message names "
        "which.",
    "CACHE_EXPIRED": "Nothing: the choice is made anew.",
    "PLAN_BUCKET_MISS": "The call was chosen at run time. `lz solve` again with such calls to "
        "have them in the table.",
    "NOT_AGREED": "The choice is this rank's own until every rank calls `lz.distributed.sync()`, "
        "or `lz.distributed.agree(calls)` ahead.",
    "PLAN_DRIFT": "Hardware, driver, a library or the policy changed since the table was made.",
    "SCHEMA_UNKNOWN": "The file is of another release: write it again with this one.",
}


def code_sections(kernels: list[Kernel]) -> str:
    """A heading for each code, by category: what it says, what it means, what to do."""
    text = ""
    for category in Category:
        text += f"## {category.value.capitalize()}\n\n{KINDS[category]}\n\n"
        for code in (c for c in Code if c.category is category):
            saying = [k.id for k in kernels if any(leaf.code is code for rule in k.requires
                                                   for leaf in rule.leaves())]
            number = f"{len(saying)} kernels, such as " if len(saying) > 1 else ""
            who = f" Declared by {number}`{saying[0]}`." if saying else ""
            do = f"**Do:** {code.advice}." if code.advice else ""
            means = REMEDIES.get(code.value, "")
            text += f"### {code.value}\n\n*{code.template}*\n\n{f'{means} {do}'.strip()}{who}\n\n"
    return text.rstrip() + "\n"


def error_list() -> str:
    """Every error class with its base among Python's own, and its first sentence."""
    text = ""
    for name in errors.__all__:
        kind = getattr(errors, name)
        base = next(b.__name__ for b in kind.__mro__ if b.__module__ == "builtins")
        said = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        text += f"- `{name}` (`{base}`): {said}\n"
    return text
