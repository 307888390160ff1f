"""Attacks by files that are data: definitions, workloads, tables, and names planted where something
is written.

None of them runs code by being read, listed, put in force or written out.
"""

from __future__ import annotations

import ast
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import run_python

import layerzero as lz
from layerzero.dispatch.binding import bind
from layerzero.plan.table import Table, digest, write_json
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.errors import DataError, SpecError
from layerzero.spec.plan import Transform
from layerzero.verify.trace import write_tests as definition_tests
from layerzero.verify.trace.dataset import find_workloads
from layerzero.verify.trace.definition import Axis, Definition, Workload
from layerzero.verify.trace.inputs.generation import generate
from layerzero.verify.trace.traces import solution_of
from layerzero.verify.trace.write_tests import as_docstring, write_tests
from layerzero.world.registry.catalog import discover

SOURCES = Path(lz.__file__).parents[1]


def process(code: str) -> str:
    """The last line that another process prints."""
    done = run_python("-c", code, timeout=300, env={**os.environ, "PYTHONPATH": str(SOURCES)})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


# Definitions, which are text until someone runs their reference

FIXTURES = Path(__file__).parents[2] / "fixtures" / "definitions"
HOSTILE = (
    '"""\nimport os\nos.mkdir({proof!r})\n"""', "'''\nimport os\n'''", '"', "'", "\\", '\\"""',
    'ends with "', '""" + __import__("os").mkdir({proof!r}) + """', "{{__import__('os')}}", "{{}}",
    "{{0}}", "%s", "ends \\", "\x00", "\r\nimport os\r",
    "\x1b[2J", "# -*- coding: utf-7 -*-", "a\n# coding: utf-7\n+AAo-import os", "\u202eevil",
    "\u2028import os", "\x0c", "\\N{{BULLET}}", "\\x41", "\ufeff", "N" * 20000)


def plain_definition(**changes: object) -> Definition:
    return replace(Definition.load(next(FIXTURES.rglob("norm_h48_one_plus.json"))), origin=None,
                   **changes)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_text_becomes_a_docstring_and_nothing_else(text, tmp_path):
    text = text.format(proof=str(tmp_path / "proof"))
    tree = ast.parse(f"{as_docstring(text)}\nX = 1\n")
    assert len(tree.body) == 2 and ast.get_docstring(tree, clean=False) == text


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_descriptions_names_and_types_are_written_as_literals(text, tmp_path):
    """The code that is written has the same form as that for a harmless definition; only texts in
    it differ."""
    text = text.format(proof=str(tmp_path / "proof"))
    named = text.replace("/", "").replace("\\", "").replace("\0", "") or "x"
    hostile = plain_definition(description=text, name=named, op_type=named)
    harmless = plain_definition(description="", name="x", op_type=hostile.op_type)
    written = ast.parse(definition_tests.test_file(hostile, hostile, note=text))
    assert _form(written) == _form(ast.parse(definition_tests.test_file(harmless, harmless)))
    compile(written, "<test>", "exec")


def _form(tree: ast.AST) -> list[str]:
    """The tree without its texts and without the title of its class, which is made of letters and
    digits alone."""
    form = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert node.name.isidentifier() and node.name.startswith("Test")
        name = getattr(node, "id", "")
        form.append(f"{type(node).__name__} {'' if name.startswith('Test') else name}")
    return form


def test_what_is_written_can_be_imported_and_runs_nothing_of_a_description(tmp_path):
    proof = tmp_path / "proof"
    evil = f'"""\nimport os\nos.mkdir({str(proof)!r})\n"""'
    name = 'x"+__import__("os").mkdir("proof")+"{__import__(\'os\').mkdir(\'proof\')}'
    hostile = plain_definition(description=evil, name=name, op_type=name)
    [path] = write_tests(tmp_path / "tests", [hostile])
    code = (f"import os, runpy; os.chdir({str(tmp_path)!r}); "
            f"print(runpy.run_path({str(path)!r})['NAME'])")
    assert process(code) == name and not proof.exists()


@pytest.mark.parametrize("name", ["x=print('run'), y", "x):\n    import os\n    def y(", "a b",
                                  "lambda", "", "1x", "x.y", "x'", "None", "x\n"])
@pytest.mark.parametrize("group", ["axes", "inputs", "outputs"])
def test_names_that_are_none_are_refused_where_code_is_written(name, group, tmp_path):
    data = plain_definition().to_json()
    first = next(iter(data[group]))
    data[group] = {name if n == first else n: v for n, v in data[group].items()}
    if group == "axes":
        for part in ("inputs", "outputs"):
            for spec in data[part].values():
                spec["shape"] = (spec["shape"]
                                 and [name if axis == first else axis for axis in spec["shape"]])
    with pytest.raises(DataError, match="name as Python has them"):
        Definition.from_json(data)
    definition = plain_definition()
    unread = replace(definition, **{group: {name: next(iter(getattr(definition, group).values()))}})
    for write in (lambda: definition_tests.test_file(unread, unread), lambda: solution_of(unread),
                  lambda: write_tests(tmp_path, [unread])):
        with pytest.raises(DataError, match="names as Python has them"):
            write()
    assert not list(tmp_path.rglob("test_*"))


def test_an_axis_called_like_an_argument_is_told(tmp_path):
    definition = plain_definition()
    odd = replace(definition, axes={**definition.axes, "seed": Axis()})
    with pytest.raises(DataError, match="no test can be written for it"):
        write_tests(tmp_path, [odd])


def test_a_solution_says_its_call_in_a_literal():
    [source] = solution_of(plain_definition()).sources
    tree = ast.parse(source.content)
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert ast.get_docstring(tree, clean=False) and functions == ["run"]


def test_reading_and_listing_definitions_runs_nothing(tmp_path):
    proof = tmp_path / "proof"
    data = plain_definition().to_json()
    data["reference"] = f"import os\nos.mkdir({str(proof)!r})\n" + data["reference"]
    data["constraints"] = [f"__import__('os').mkdir({str(proof)!r}) == 1"]
    home = tmp_path / "definitions" / data["op_type"]
    home.mkdir(parents=True)
    (home / f"{data['name']}.json").write_text(json.dumps(data))
    definition = Definition.load(home / f"{data['name']}.json")
    generate(definition)
    write_tests(tmp_path / "tests", [definition])
    assert not proof.exists()


# Workloads name files of their dataset, and no others

@pytest.fixture
def dataset(tmp_path) -> Definition:
    torch_save = pytest.importorskip("safetensors.torch").save_file
    data = plain_definition().to_json()
    home = tmp_path / "set" / "definitions" / data["op_type"]
    home.mkdir(parents=True)
    (home / f"{data['name']}.json").write_text(json.dumps(data))
    definition = Definition.load(home / f"{data['name']}.json")
    first = next(iter(definition.inputs))
    tensors = {"t": generate(definition)[first]}
    (tmp_path / "set" / "blob").mkdir()
    for path in ("set/blob/in.safetensors", "out.safetensors"):
        torch_save(tensors, tmp_path / path)
    (tmp_path / "set" / "blob" / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (tmp_path / "set" / "blob" / "own.safetensors").symlink_to("in.safetensors")
    (tmp_path / "set" / "away").symlink_to(tmp_path)
    return definition


def stored(definition: Definition, path: str) -> Workload:
    first = next(iter(definition.inputs))
    spec = {"type": "safetensors", "path": path, "tensor_key": "t"}
    return Workload.from_json({"axes": dict.fromkeys(definition.var_axes, 5),
                               "inputs": {first: spec}, "uuid": "u"})


@pytest.mark.parametrize("path", ["../out.safetensors", "blob/../../out.safetensors",
                                  "{outside}/out.safetensors", "blob/link.safetensors",
                                  "away/out.safetensors", "..\\out.safetensors", "/etc/passwd",
                                  "/dev/zero", "../../../../../../../etc/passwd", "blob/\0",
                                  "x/" * 3000])
def test_a_path_out_of_the_dataset_is_refused(dataset, tmp_path, path):
    with pytest.raises(DataError, match="wanted the path of a file of this dataset"):
        generate(dataset, workload=stored(dataset, path.format(outside=tmp_path)))


@pytest.mark.parametrize("path", ["blob/in.safetensors", "./blob/in.safetensors",
                                  "blob/own.safetensors"])
def test_a_path_inside_is_read(dataset, path):
    first = next(iter(dataset.inputs))
    assert generate(dataset, workload=stored(dataset, path))[first].equal(generate(dataset)[first])


def test_workloads_that_lie_elsewhere_are_not_read(dataset, tmp_path):
    home = tmp_path / "set" / "workloads" / dataset.op_type
    home.mkdir(parents=True)
    (home / f"{dataset.name}.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match="leads out"):
        find_workloads(dataset)


# Plugins are code, which listing them does not run

def test_plugins_are_listed_without_being_imported(tmp_path):
    folder = tmp_path / "evil-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[layerzero.backends]\nevil = evil_plugin\n")
    (tmp_path / "evil_plugin.py").write_text("print('imported')\nKERNELS = ()\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from layerzero.world.registry import catalog
problems = []
found = [(entry.name, origin) for group in catalog.ENTRY_POINTS for entry, origin in catalog._plugins(group, problems)]
assert ("evil", "evil 1.0") in found and "evil_plugin" not in sys.modules, found
import layerzero, layerzero.cli.app
print("evil_plugin" in sys.modules)
"""
    assert process(code) == "False"


# Tables are data, whose numbers and names are made into code

@pytest.mark.parametrize(("kind", "target"), [
    ("contiguous", "x[__import__('os').mkdir({proof!r})]"), ("contiguous", "weights"),
    ("contiguous", "eps"), ("layout", "x'; __import__('os').mkdir({proof!r})#"), ("layout", "bhsd"),
    ("cast", "load"), ("cast", "float99"), ("cast", "classes")])
def test_what_a_table_does_to_inputs_is_checked(world, tmp_path, kind, target):
    x, proof = torch.randn(4, 64), tmp_path / "proof"
    call = Call("rms_norm", {"x": TensorSpec((4, 64), "float32")})
    data = lz.tables.solve([call], device="cpu").to_json()
    for row in data["rows"]:
        for choice in row["choices"]:
            choice["transforms"] = [[kind, target.format(proof=str(proof))]]
    data["hash"] = digest({k: v for k, v in data.items() if k != "hash"})
    with pytest.raises(DataError, match="no call of rms_norm can be changed that way"):
        try:
            lz.tables.use_table(Table.from_json(data))
            lz.rms_norm(x)
        finally:
            lz.tables.use_table(None)
    assert not proof.exists()


def test_code_is_made_of_the_names_of_parameters_alone(tmp_path):
    from layerzero.ops.rms_norm import OP

    kernel = discover()[0].by_id["torch.rms_norm"]
    attack = Transform("contiguous", f"x[__import__('os').mkdir({str(tmp_path / 'proof')!r})]")
    with pytest.raises(SpecError, match="wanted a tensor of rms_norm"):
        bind(OP, kernel, OP.reference, (attack,), "", {})
    assert not (tmp_path / "proof").exists()


def test_what_the_user_asked_for_is_not_written_through_planted_names(tmp_path):
    victim, target = tmp_path / "victim", tmp_path / "out.json"
    victim.write_text("untouched")
    (tmp_path / f".{target.name}.{os.getpid()}").symlink_to(victim)
    write_json(target, {"a": 1})
    with lz.recording(target):
        lz.rms_norm(torch.randn(2, 8))
    assert victim.read_text() == "untouched" and "rms_norm" in target.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".{target.name}.{os.getpid()}",
                                                          target.name, victim.name]
