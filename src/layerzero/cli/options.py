"""Options that several commands share, and the checks of them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..ops import CATALOG as OPS
from ..spec.device import DEVICE_TYPES
from ..spec.errors import ConfigError
from ..spec.names import suggest
from ..tuning.models import MODELS

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
          "float8_e4m3fnuz",
          "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint8", "bool")
ALIASES = {"fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32",
           "f32": "float32", "fp16": "float16", "half": "float16", "f16": "float16",
           "bf16": "bfloat16", "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
           "e5m2": "float8_e5m2", "long": "int64", "int": "int32"}
FLOATS = ("float32", "bfloat16", "float16")    # what models are computed in
AUTO = "auto"
STDOUT = Path("-")


def dtype_name(name: str) -> str:
    """Return torch's name of a dtype; fp16, bf16, half and the like are understood."""
    text = name.removeprefix("torch.").lower()
    text = ALIASES.get(text, text)
    if text not in DTYPES:
        raise ConfigError(f"there is no dtype {name!r}{suggest(text, (*DTYPES, *ALIASES))}")
    return text


def _dtype_or_auto(name: str) -> str:
    return name if name == AUTO else dtype_name(name)


def float_dtype(name: str) -> str:
    """Return torch's name of a dtype that whole models are computed in."""
    dtype = dtype_name(name)
    if dtype not in FLOATS:
        raise ConfigError(f"--dtype must be one of {', '.join(FLOATS)} (fp32, bf16, fp16), got "
                          f"{name!r}")
    return dtype


def _float_dtypes(names: list[str] | None) -> list[str]:
    return [float_dtype(name) for name in names or ()]


def _device(kind: str | None) -> str | None:
    if kind is not None and kind.partition(":")[0] not in DEVICE_TYPES:
        raise ConfigError(f"device kind must be one of {', '.join(DEVICE_TYPES)}, got {kind!r}; "
                          "leave out --device for this machine's accelerator, else its CPU")
    return kind


def _model(name: str | None) -> str | None:
    if name is None:
        return name
    if name in MODELS:
        return name
    if name.endswith(".gguf"):
        raise ConfigError(f"--model {name}: a GGUF file is run by lz generate and lz verify "
                          "models; for its calls: lz record -- lz generate Hello --model "
                          f"{name}, then --calls")
    raise ConfigError(f"--model: there is no model {name!r}{suggest(name, MODELS)}; the calls of "
                      "any other: lz record -- python app.py, then --calls calls.jsonl")


def _complete_model(incomplete: str) -> list[str]:
    return complete(tuple(MODELS))(incomplete)


def complete(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a completion function that offers these words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
DeviceKind = Annotated[str | None, typer.Option(
    "--device", callback=_device, autocompletion=complete(DEVICE_TYPES),
    help="cpu, cuda, ...; default: this machine's accelerator, else its CPU")]

# One call, or where calls come from: these are given the same way everywhere.
_op: dict[str, Any] = {"metavar": "OP", "autocompletion": complete(OPS)}
OpName = Annotated[str, typer.Argument(**_op, help="an operation, such as attention")]
SomeOp = Annotated[str | None, typer.Argument(**_op, help=(
    "an operation: its contract's own cases, or the call of these shapes"))]
OnlyOp = Annotated[str | None, typer.Argument(**_op, help="only this operation")]
OneCall = Annotated[list[str] | None, typer.Argument(
    metavar="SHAPE", help="query=1x32x1x128 mask=8x8:bool is_causal=true ...")]
Shapes = Annotated[list[str] | None, typer.Argument(metavar="SHAPE", help=(
    "query=1x32x1x128 mask=8x8:bool is_causal=true ...; several calls: x=8x64 and x=512x64"))]
Dtype = Annotated[str, typer.Option(
    "--dtype", callback=_dtype_or_auto, autocompletion=complete((AUTO, *DTYPES, *ALIASES)), help=(
        "of the tensors, or of the model: bfloat16, fp16, bf16, ...; one tensor's own: "
        "mask=8x8:bool; auto: bfloat16 where the device computes in it, else float32"))]
FloatDtypes = Annotated[list[str] | None, typer.Option(
    "--dtype", callback=_float_dtypes, autocompletion=complete((*FLOATS, "fp32", "bf16", "fp16")),
    help="float32, bfloat16, float16; may be repeated")]
CallsFile = Annotated[Path | None, typer.Option(
    "--calls", help="a file of calls, as lz record writes it")]
Model = Annotated[str | None, typer.Option(
    "--model", callback=_model, autocompletion=_complete_model,
    help="the calls of a model that lz knows, such as llama-3-8b")]
Program = Annotated[str | None, typer.Option("--program", help=(
    "module:function, which gives a model and its example arguments as one tuple"))]
Batch = Annotated[int, typer.Option(min=1, help="with --model: batch size")]
Prompt = Annotated[int, typer.Option(min=1, help="with --model: tokens of a prompt")]
Context = Annotated[int, typer.Option(
    min=1, help="with --model: tokens in the KV cache when decoding")]
TableFile = Annotated[Path | None, typer.Option(
    "--table", help="a dispatch table, as lz solve writes it")]
LockFile = Annotated[Path | None, typer.Option("--lock", help="a lockfile, as lz lock writes it")]
CapabilitiesFile = Annotated[Path | None, typer.Option(
    "--capabilities", help="a capabilities.json to be used")]


@dataclass(frozen=True)
class Source:
    """The source of the calls of a command: at most one of op, calls, model, program and table."""

    op: str | None = None
    words: Sequence[str] = ()
    calls: Path | None = None
    model: str | None = None
    program: str | None = None
    table: Path | None = None
    dtype: str = "bfloat16"
    batch: int = 1
    prompt: int = 512
    context: int = 4096
    scale: float = 1.0

    def check(self, command: str, *more: str, needed: bool = True) -> Source:
        """Return self if one readable source is given; `more`: options beside the usual three."""
        known = {"OP": self.op, "--calls": self.calls, "--model": self.model,
                 "--program": self.program, "--table": self.table}
        sources = [name for name, value in known.items() if value is not None]
        if len(sources) > 1 or (needed and not sources):
            options = ("OP", "--calls", "--model", *more)
            raise ConfigError(f"{command} takes one of {', '.join(options)}, got "
                              f"{' and '.join(sources) or 'none'}")
        check_file("--calls", self.calls, "lz record -- python app.py writes one")
        check_file("--table", self.table, "lz solve writes one")
        if self.program is not None and not all(self.program.partition(":")):
            raise ConfigError(f"--program wants module:function, got {self.program!r}")
        return self


def check_file(option: str, path: Path | None, hint: str) -> None:
    if path is not None and not path.is_file():
        raise ConfigError(f"{option} {path}: there is no such file; {hint}")


def check_out(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    if path is None:
        return
    if path == STDOUT:
        raise ConfigError(f"{option} -: wanted the name of a file; --json prints to stdout")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: the folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise ConfigError(f"{option}: wanted a file, {path} is a folder")
