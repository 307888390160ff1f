"""Why a kernel may not serve a call. The codes are the stable, public vocabulary of the library.

A code never changes its string and is never reused. Its category says who can act on it, its
template turns `want` and `got` into a sentence, and `advice` says what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Union

Scalar = Union[str, int, float, bool, None]
Value = Union[Scalar, tuple[Scalar, ...]]

# what many codes say
FACT = "{fact} must be {want}, got {got}"
ANOTHER_KERNEL = "let another kernel serve the call"
OR_ANOTHER = f", or {ANOTHER_KERNEL}"
OTHER_HARDWARE = f"it is made for other hardware: {ANOTHER_KERNEL}"


class Category(str, Enum):
    """The kind of obstacle that a code is about."""

    HARDWARE = "hardware"
    DTYPE = "dtype"
    SHAPE = "shape"
    LAYOUT = "layout"
    FEATURE = "feature"
    MODE = "mode"
    SOFTWARE = "software"
    POLICY = "policy"
    HEALTH = "health"
    MEMORY = "memory"
    CALLER = "caller"
    CACHE = "cache"
    PLAN = "plan"
    DATA = "data"


class Code(str, Enum):
    """A stable string with its category, message template and advice."""

    category: Category
    template: str
    advice: str

    def __new__(cls, value: str, category: Category, template: str, advice: str = "") -> Code:
        member = str.__new__(cls, value)
        member._value_ = value
        member.category = category
        member.template = template
        member.advice = advice
        return member

    def __str__(self) -> str:
        return self.value

    @property
    def remedy(self) -> str:
        """The advice without its alternative, another kernel; "" if it has no other."""
        return self.advice.removesuffix(ANOTHER_KERNEL).removesuffix(", or ").removesuffix(": ")

    # hardware
    PLATFORM_MISMATCH = (
        "PLATFORM_MISMATCH", Category.HARDWARE, "runs on {want}, the tensors are on {got}",
        "move the tensors there" + OR_ANOTHER)
    VENDOR_MISMATCH = (
        "VENDOR_MISMATCH", Category.HARDWARE, "made for {want} hardware, this is {got}",
        OTHER_HARDWARE)
    SM_TOO_OLD = (
        "SM_TOO_OLD", Category.HARDWARE, "needs compute capability {want}, this GPU has {got}",
        OTHER_HARDWARE)
    SM_TOO_NEW = (
        "SM_TOO_NEW", Category.HARDWARE, "supports compute capability {want}, this GPU has {got}",
        "update its library if a newer release knows this GPU" + OR_ANOTHER)
    GPU_GENERATION_UNSUPPORTED = (
        "GPU_GENERATION_UNSUPPORTED", Category.HARDWARE, "made for {want}, this GPU is {got}",
        OTHER_HARDWARE)
    TENSOR_CORE_GENERATION = (
        "TENSOR_CORE_GENERATION", Category.HARDWARE,
        "needs tensor cores {want}, this GPU has {got}", OTHER_HARDWARE)
    MATMUL_IS_FAST = (
        "MATMUL_IS_FAST", Category.HARDWARE,
        "for CPUs on which torch emulates this dtype's matmul, this is none",
        "nothing: torch's own kernel is the fast one here")
    CPU_ISA_MISSING = (
        "CPU_ISA_MISSING", Category.HARDWARE, "needs CPU instructions {want}, this CPU has {got}",
        OTHER_HARDWARE)
    CUDA_BLOCK_LIMIT_EXCEEDED = (
        "CUDA_BLOCK_LIMIT_EXCEEDED", Category.HARDWARE, FACT, "split the batch" + OR_ANOTHER)
    # dtype
    DTYPE_UNSUPPORTED = ("DTYPE_UNSUPPORTED", Category.DTYPE, FACT, "cast the tensors" + OR_ANOTHER)
    MASK_DTYPE_UNSUPPORTED = (
        "MASK_DTYPE_UNSUPPORTED", Category.DTYPE, "the mask must be {want}, got {got}",
        "cast the mask" + OR_ANOTHER)
    QUANT_FORMAT_UNSUPPORTED = (
        "QUANT_FORMAT_UNSUPPORTED", Category.DTYPE, "quantization format must be {want}, got {got}",
        "quantize to such a format" + OR_ANOTHER)
    SCALE_LAYOUT_MISMATCH = (
        "SCALE_LAYOUT_MISMATCH", Category.DTYPE, FACT, "quantize with such scales" + OR_ANOTHER)
    KV_CACHE_DTYPE_MISMATCH = (
        "KV_CACHE_DTYPE_MISMATCH", Category.DTYPE, FACT,
        "keep the cache in the query's dtype, pass its scales (1.0 for a plain cast), or set "
        "allow_adaptation: true")
    # shape
    HEAD_DIM_INVALID = ("HEAD_DIM_INVALID", Category.SHAPE, FACT, ANOTHER_KERNEL)
    HEAD_DIM_TOO_LARGE = ("HEAD_DIM_TOO_LARGE", Category.SHAPE, FACT, ANOTHER_KERNEL)
    HEAD_DIM_ALIGNMENT = ("HEAD_DIM_ALIGNMENT", Category.SHAPE, FACT, "pad the heads" + OR_ANOTHER)
    SEQ_LEN_UNSUPPORTED = ("SEQ_LEN_UNSUPPORTED", Category.SHAPE, FACT, ANOTHER_KERNEL)
    SHAPE_UNSUPPORTED = ("SHAPE_UNSUPPORTED", Category.SHAPE, FACT, ANOTHER_KERNEL)
    EMPTY_INPUT = ("EMPTY_INPUT", Category.SHAPE, FACT, "pass tensors that are not empty there")
    GQA_UNSUPPORTED = ("GQA_UNSUPPORTED", Category.SHAPE, FACT, "repeat the KV heads" + OR_ANOTHER)
    PAGE_SIZE_UNSUPPORTED = (
        "PAGE_SIZE_UNSUPPORTED", Category.SHAPE, "page size must be {want}, got {got}",
        "make the cache with such pages" + OR_ANOTHER)
    # layout
    STRIDE_LAST_DIM = (
        "STRIDE_LAST_DIM", Category.LAYOUT, FACT,
        "pass a tensor whose last dimension is contiguous, or allow LayerZero to copy it "
        "(strict_mode: false)")
    NOT_CONTIGUOUS = (
        "NOT_CONTIGUOUS", Category.LAYOUT, FACT,
        "call .contiguous(), or allow LayerZero to copy it (strict_mode: false)")
    POINTER_ALIGNMENT = (
        "POINTER_ALIGNMENT", Category.LAYOUT, "{fact} must be {want} bytes, got {got}",
        "pass a tensor that is no slice of another, or allow LayerZero to copy it (strict_mode: "
        "false)")
    LAYOUT_UNSUPPORTED = (
        "LAYOUT_UNSUPPORTED", Category.LAYOUT, "layout must be {want}, got {got}",
        "pass that layout, or allow LayerZero to view the tensors so (strict_mode: false)")
    KV_CACHE_LAYOUT_MISMATCH = (
        "KV_CACHE_LAYOUT_MISMATCH", Category.LAYOUT,
        "the KV cache layout must be {want}, got {got}",
        "make the cache in that layout" + OR_ANOTHER)
    RAGGED_UNSUPPORTED = (
        "RAGGED_UNSUPPORTED", Category.LAYOUT, "takes {want} tensors, got {got}",
        "pack the sequences and call lz.varlen_attention, or pad them")
    TENSOR_SUBCLASS_UNSUPPORTED = (
        "TENSOR_SUBCLASS_UNSUPPORTED", Category.LAYOUT, "takes {want} tensors, got {got}",
        "pass plain tensors" + OR_ANOTHER)
    # feature
    MASK_UNSUPPORTED = (
        "MASK_UNSUPPORTED", Category.FEATURE, "takes no attention mask, got {got}",
        "pass is_causal or a window in its place" + OR_ANOTHER)
    MASK_BROADCAST_UNSUPPORTED = (
        "MASK_BROADCAST_UNSUPPORTED", Category.FEATURE,
        "{fact} must have {want} dimensions, got {got}", "expand the mask" + OR_ANOTHER)
    CAUSAL_UNSUPPORTED = (
        "CAUSAL_UNSUPPORTED", Category.FEATURE, "causal attention is not supported here",
        ANOTHER_KERNEL)
    CAUSAL_ALIGNMENT_UNSUPPORTED = (
        "CAUSAL_ALIGNMENT_UNSUPPORTED", Category.FEATURE, FACT, "pass causal_align" + OR_ANOTHER)
    DROPOUT_UNSUPPORTED = (
        "DROPOUT_UNSUPPORTED", Category.FEATURE, "dropout must be {want}, got {got}",
        "pass dropout_p=0.0" + OR_ANOTHER)
    WINDOW_UNSUPPORTED = (
        "WINDOW_UNSUPPORTED", Category.FEATURE, FACT, "leave the window out" + OR_ANOTHER)
    ALIBI_UNSUPPORTED = (
        "ALIBI_UNSUPPORTED", Category.FEATURE, "takes no ALiBi slopes",
        "leave alibi_slopes out" + OR_ANOTHER)
    SOFTCAP_UNSUPPORTED = (
        "SOFTCAP_UNSUPPORTED", Category.FEATURE, "softcap must be {want}, got {got}",
        "leave softcap out" + OR_ANOTHER)
    LSE_UNSUPPORTED = (
        "LSE_UNSUPPORTED", Category.FEATURE, "does not return the log-sum-exp",
        "pass return_lse=False" + OR_ANOTHER)
    SCALE_UNSUPPORTED = (
        "SCALE_UNSUPPORTED", Category.FEATURE, "scale must be {want}, got {got}",
        "pass such a scale" + OR_ANOTHER)
    FEATURE_UNSUPPORTED = ("FEATURE_UNSUPPORTED", Category.FEATURE, FACT, ANOTHER_KERNEL)
    ROPE_STYLE_UNSUPPORTED = (
        "ROPE_STYLE_UNSUPPORTED", Category.FEATURE, "rope style must be {want}, got {got}",
        "pass that style" + OR_ANOTHER)
    # mode
    BACKWARD_UNSUPPORTED = (
        "BACKWARD_UNSUPPORTED", Category.MODE, "has no backward; a gradient was asked for",
        "call under torch.no_grad() for inference")
    NOT_DETERMINISTIC = (
        "NOT_DETERMINISTIC", Category.MODE,
        "is not deterministic; deterministic results were asked for",
        "allow others: deterministic: false, torch.use_deterministic_algorithms(False)")
    CUDA_GRAPH_UNSAFE = (
        "CUDA_GRAPH_UNSAFE", Category.MODE, "is not safe to capture in a CUDA graph: {got}",
        "call it outside the capture" + OR_ANOTHER)
    COMPILE_UNSUPPORTED = (
        "COMPILE_UNSUPPORTED", Category.MODE, "cannot be traced by torch.compile",
        "call it outside torch.compile" + OR_ANOTHER)
    TP_INVARIANCE_REQUIRED = (
        "TP_INVARIANCE_REQUIRED", Category.MODE,
        "results may differ across tensor-parallel sizes; {want} was asked for", ANOTHER_KERNEL)
    BATCH_INVARIANCE_REQUIRED = (
        "BATCH_INVARIANCE_REQUIRED", Category.MODE,
        "a row's result may depend on its neighbours; {want} was asked for", ANOTHER_KERNEL)
    INVARIANCE_NOT_REQUIRED = (
        "INVARIANCE_NOT_REQUIRED", Category.MODE,
        "is made for {want}, which nobody asked for, and is slow",
        "set it, or name the kernel with backend=")
    JIT_NOT_WARMED = (
        "JIT_NOT_WARMED", Category.MODE, "compiles on first use and was not warmed up",
        "run lz warmup or lz tune for such calls, name it with backend=, or set jit: in_request")
    SDPA_BACKEND_DISABLED = (
        "SDPA_BACKEND_DISABLED", Category.MODE,
        "is {want}; torch.nn.attention.sdpa_kernel allows only {got}",
        "leave that block, name more implementations in it, or undo "
        "torch.backends.cuda.enable_*_sdp(False)")
    # software
    NOT_INSTALLED = (
        "NOT_INSTALLED", Category.SOFTWARE, "needs package {want}, which is not installed",
        "install the package" + OR_ANOTHER)
    NOT_BUILT = (
        "NOT_BUILT", Category.SOFTWARE, "is not compiled for this machine yet", "run: lz build")
    BUILD_REFUSED = (
        "BUILD_REFUSED", Category.SOFTWARE, "its compiled code is not trusted: {got}",
        "run: lz build")
    COMPILER_MISSING = (
        "COMPILER_MISSING", Category.SOFTWARE, "compiles its code with {want}, which was not found",
        "install one, or name it in CXX")
    VERSION_CONFLICT = (
        "VERSION_CONFLICT", Category.SOFTWARE, "needs {want}, found {got}",
        "install such a version" + OR_ANOTHER)
    ABI_MISMATCH = (
        "ABI_MISMATCH", Category.SOFTWARE, "was built for another torch or C++ runtime: {got}",
        "install a build of the package made for this torch")
    IMPORT_FAILED = (
        "IMPORT_FAILED", Category.SOFTWARE, "importing {want} failed: {got}",
        "run lz doctor --deep, which imports each library by itself")
    ISOLATED = (
        "ISOLATED", Category.SOFTWARE, "runs in a process of its own by {want}, as {got}",
        "name that one, or change the setting isolation")
    WORKER_UNAVAILABLE = (
        "WORKER_UNAVAILABLE", Category.SOFTWARE, "its worker process cannot serve: {got}",
        "run lz doctor --matrix, which has what each interpreter holds")
    CUDA_TOO_OLD = (
        "CUDA_TOO_OLD", Category.SOFTWARE, "needs CUDA {want}, found {got}",
        "install a torch for such a CUDA" + OR_ANOTHER)
    TORCH_ENTRY_MISSING = (
        "TORCH_ENTRY_MISSING", Category.SOFTWARE, "this torch has no {want}",
        "install a torch that has it" + OR_ANOTHER)
    UNTESTED_ON_HARDWARE = (
        "UNTESTED_ON_HARDWARE", Category.SOFTWARE,
        "was written from its source and never run on such hardware",
        "name it with backend= and run lz verify for it, or set allow_untested: true")
    # policy
    DENIED_BY_POLICY = (
        "DENIED_BY_POLICY", Category.POLICY, "denied by {got}", "change that rule" + OR_ANOTHER)
    NOT_ALLOWED_BY_POLICY = (
        "NOT_ALLOWED_BY_POLICY", Category.POLICY, "not among {want}, allowed by {got}",
        "add it to that rule" + OR_ANOTHER)
    LOCKED_TO_ANOTHER = (
        "LOCKED_TO_ANOTHER", Category.POLICY, "{got} locks this call to {want}",
        "remove that lock" + OR_ANOTHER)
    NOT_THE_NAMED_KERNEL = (
        "NOT_THE_NAMED_KERNEL", Category.POLICY, "the call asked for {want}",
        "leave backend= out to let lz choose")
    STRICT_TRANSFORM_REFUSED = (
        "STRICT_TRANSFORM_REFUSED", Category.POLICY,
        "would need the transform {got}, refused by {want}",
        "set strict_mode: false, or allow_adaptation: true for casts")
    UNCERTIFIED = (
        "UNCERTIFIED", Category.POLICY, "has no certificate for this machine; policy demands one",
        "run lz verify kernels for it")
    CERTIFICATE_VOID = (
        "CERTIFICATE_VOID", Category.POLICY, "its certificate was for {want}, now it is {got}",
        "run lz verify kernels for it")
    CERTIFICATE_REFUSED = (
        "CERTIFICATE_REFUSED", Category.POLICY, "its certificate is not trusted: {got}",
        "run lz verify kernels for it")
    CERTIFICATION_FAILED = (
        "CERTIFICATION_FAILED", Category.POLICY, "failed when it was verified here: {got}",
        "run lz verify kernels for it once it is corrected, or name it with backend= to run it "
        "anyway")
    LZ_DISABLED = (
        "LZ_DISABLED", Category.POLICY, "LayerZero is disabled here; only torch's default runs",
        "leave the lz.disabled() block, or set disabled: false")
    # health
    CIRCUIT_OPEN = (
        "CIRCUIT_OPEN", Category.HEALTH,
        "disabled after {got}; it will be tried again after {want}", "lz doctor has its last fault")
    BACKEND_DISABLED = (
        "BACKEND_DISABLED", Category.HEALTH, "disabled for this process: {got}",
        "correct the cause and restart the process")
    KERNEL_FAILED = (
        "KERNEL_FAILED", Category.HEALTH, "failed when called: {got}",
        "lz verify shows the calls it fails; deny it in the policy until it is corrected")
    KERNEL_TIMEOUT = (
        "KERNEL_TIMEOUT", Category.HEALTH, "did not finish within {want}",
        "raise call_timeout, or deny it in the policy")
    WRONG_RESULT = (
        "WRONG_RESULT", Category.HEALTH, "returned {got}, the operation gives {want}",
        "correct the kernel; lz verify kernels shows every case it gets wrong")
    INPUT_CHANGED = (
        "INPUT_CHANGED", Category.HEALTH, "changed {got} and then failed: {want}",
        "restore the inputs and call again: the kernel is not asked again for such calls")
    DEVICE_FAULT = (
        "DEVICE_FAULT", Category.HEALTH, "left the device in a failed state: {got}",
        "the device context is lost; restart the process")
    # memory
    MEMORY_HEADROOM_EXCEEDED = (
        "MEMORY_HEADROOM_EXCEEDED", Category.MEMORY,
        "needs {got} bytes of workspace, the headroom is {want}",
        "free memory, make the call smaller, or raise memory_headroom")
    OUT_OF_MEMORY = (
        "OUT_OF_MEMORY", Category.MEMORY, "ran out of memory: {got}",
        "free memory, or make the call smaller")
    # the caller's own mistakes
    WRONG_TYPE = ("WRONG_TYPE", Category.CALLER, FACT, "pass an argument of that type")
    TENSOR_UNREADABLE = (
        "TENSOR_UNREADABLE", Category.CALLER, FACT,
        "make it a plain tensor first: to_dense() of a sparse or mkldnn one, to_padded_tensor() of "
        "a nested one; a freed one needs its memory again, as in FSDP's unshard()")
    WRONG_NDIM = (
        "WRONG_NDIM", Category.CALLER, "{fact} must have {want} dimensions, got {got}",
        "reshape the tensor; help(lz.<op>) has the shapes")
    DIM_MISMATCH = (
        "DIM_MISMATCH", Category.CALLER, FACT,
        "pass tensors whose sizes agree; help(lz.<op>) has the shapes")
    MIXED_DEVICES = (
        "MIXED_DEVICES", Category.CALLER, "all tensors must be on {want}, {fact} is {got}",
        "move the tensors to one device")
    MIXED_DTYPES = ("MIXED_DTYPES", Category.CALLER, "{fact} must be {want}, got {got}",
                    "cast the tensors to one dtype, or set allow_adaptation: true")
    MASK_WITH_CAUSAL = (
        "MASK_WITH_CAUSAL", Category.CALLER, "attn_mask and is_causal=True were both given: {want}",
        "fold the causal triangle into attn_mask, or drop one of the two")
    MASK_BROADCAST_INVALID = (
        "MASK_BROADCAST_INVALID", Category.CALLER, "attn_mask must broadcast to {want}, got {got}",
        "give the mask that shape, or size 1 where it is the same for all")
    MASK_TYPE_INVALID = (
        "MASK_TYPE_INVALID", Category.CALLER, "attn_mask must be {want}, got {got}",
        "pass a bool mask (True: attend) or a floating-point one that is added")
    HEADS_NOT_DIVISIBLE = (
        "HEADS_NOT_DIVISIBLE", Category.CALLER, FACT,
        "pass a key and value whose number of heads divides the query's")
    LAYOUT_AMBIGUOUS = (
        "LAYOUT_AMBIGUOUS", Category.CALLER, "layout='auto' cannot tell bhsd from bshd for {got}",
        "pass layout='bhsd' or layout='bshd'")
    LAYOUT_UNKNOWN = ("LAYOUT_UNKNOWN", Category.CALLER, FACT, "pass one of these")
    VALUE_OUT_OF_RANGE = ("VALUE_OUT_OF_RANGE", Category.CALLER, FACT, "pass a value in that range")
    MISSING_METADATA = (
        "MISSING_METADATA", Category.CALLER, "{fact} is required: {want}", "pass it")
    # cache, plans, data
    TOKENIZER_MISMATCH = (
        "TOKENIZER_MISMATCH", Category.DATA, "tokenizer identity must be {want}, got {got}",
        "load the tokenizer that the data was made with")
    BLOCK_TABLE_INVALID = (
        "BLOCK_TABLE_INVALID", Category.DATA, FACT,
        "make the table with lz.kv_cache, or correct it")
    KV_METADATA_INVALID = (
        "KV_METADATA_INVALID", Category.DATA, FACT,
        "make the lengths with lz.kv_cache, or correct them")
    CACHE_EXPIRED = (
        "CACHE_EXPIRED", Category.CACHE, "the remembered choice is older than {want}",
        "nothing: the choice is made anew")
    PLAN_BUCKET_MISS = (
        "PLAN_BUCKET_MISS", Category.PLAN, "the table has no entry for {got}",
        "solve again with calls of this kind")
    NOT_AGREED = ("NOT_AGREED", Category.PLAN, "chosen by this rank alone for {got}",
                  "call lz.distributed.sync() on every rank")
    PLAN_DRIFT = (
        "PLAN_DRIFT", Category.PLAN, "the table was made for {want}, this is {got}", "solve again")
    SCHEMA_UNKNOWN = (
        "SCHEMA_UNKNOWN", Category.PLAN, "schema must be {want}, got {got}",
        "write the file again with this release")


# what methods of a foreign object may raise
FOREIGN_ERRORS: tuple[type[BaseException], ...] = (Exception,)


def plain(value: Any) -> Value:
    """Returns the value as something that JSON keeps without loss."""
    if type(value) is int and value.bit_length() > 1024:       # Python may not even write it
        return f"an int of {value.bit_length()} bits"
    if value is None or type(value) in (str, int, float, bool):
        return value  # type: ignore[no-any-return]
    if isinstance(value, (tuple, list, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return tuple(plain(v) for v in items)  # type: ignore[misc]
    return shown(value, str)


def shown(value: Any, as_text: Callable[[Any], str] = repr, limit: int = 500) -> str:
    """Returns a value as text for a message; it never raises and is never long. Python converts no
    int of more than some thousand digits, and a foreign object may raise."""
    try:
        text = as_text(value)
    except FOREIGN_ERRORS as e:
        return f"{type(value).__name__} that cannot be shown ({type(e).__name__})"
    return text if len(text) <= limit else f"{text[:limit - 3]}..."


_OF_TENSORS = {"stride_last": "{}.stride(-1)", "contiguous": "{}.is_contiguous()",
               "alignment": "the alignment of {}", "ndim": "{}"}


@dataclass(frozen=True)
class Reason:
    """One obstacle: its code, the fact it is about, what was wanted and what came."""

    code: Code
    want: Annotated[Value, Any] = None
    got: Annotated[Value, Any] = None
    fact: str = ""
    sentence: str = field(default="", compare=False)   # as a sentence about what the caller gave

    def __post_init__(self) -> None:
        object.__setattr__(self, "want", plain(self.want))
        object.__setattr__(self, "got", plain(self.got))

    @property
    def message(self) -> str:
        """The obstacle as a sentence, in torch's words for what is read of a tensor."""
        if self.sentence:
            return self.sentence
        fact, want, got = self.fact or "it", _text(self.want), _text(self.got, "")
        tensor, _, of = fact.rpartition(".")
        if want == "given":
            return f"{tensor if of == 'dtype' else fact} must be given"
        if (optional := want == "absent" or want.startswith("absent or ")):
            want = want.replace("absent", "None", 1)
        if of == "dtype" and optional:
            fact, got = tensor, f"a tensor of {got}"
        elif tensor and of in _OF_TENSORS:
            fact = _OF_TENSORS[of].format(tensor)
            want = want.removeprefix("None or ")
        return self.code.template.format(want=want, got=got, fact=fact)

    def __str__(self) -> str:
        return f"{self.code.value}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        want, got = (list(v) if isinstance(v, tuple) else v for v in (self.want, self.got))
        data = {"code": self.code.value, "want": want, "got": got, "fact": self.fact}
        return {**data, "sentence": self.sentence} if self.sentence else data


def _text(value: Value, several: str = "one of ") -> str:
    if value == ():
        return "none"
    if isinstance(value, tuple):
        return several + ", ".join(map(str, value)) if len(value) != 1 else str(value[0])
    return shown(value, str, 1000)
