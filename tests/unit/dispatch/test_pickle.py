"""Operations in what is pickled and copied: a module, a partial, a message to another process."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess

import pytest
import torch
from helpers import warm_python

import layerzero as lz
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.ops import CATALOG

PROGRAM = """
import copy, pickle, sys, torch
import layerzero as lz
from layerzero.ops import CATALOG
for name in CATALOG:
    function = getattr(lz, name)
    assert pickle.loads(pickle.dumps(function)) is function, name
    assert copy.deepcopy(function) is function and copy.copy(function) is function, name
given = pickle.loads(sys.stdin.buffer.read())
assert given is lz.attention
sys.stdout.buffer.write(pickle.dumps(lz.attention))
"""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.norm = functools.partial(lz.rms_norm, eps=1e-5)

    def forward(self, x):
        return self.norm(x, self.weight)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_operation_is_itself_after_a_pickle_and_a_copy(protocol):
    for name in CATALOG:
        function = getattr(lz, name)
        assert pickle.loads(pickle.dumps(function, protocol)) is function
        assert copy.deepcopy(function) is function


def test_a_model_that_holds_operations_is_pickled_and_copied(tmp_path):
    model, x = Model(), torch.rand(2, 8)
    torch.save(model, tmp_path / "model.pt")
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
                  torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(again(x), model(x)) and again.norm.func is lz.rms_norm


def test_one_call_path_reads_what_the_other_wrote():
    """The child has the path in Python; this process has the compiled one where it is built."""
    done = subprocess.run([warm_python(), "-c", PROGRAM], input=pickle.dumps(lz.attention),
                          env={**os.environ, "LAYERZERO_NATIVE": "0"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert pickle.loads(done.stdout) is lz.attention


def test_the_declaration_of_an_operation_is_itself_too():
    op = lz.op("attention")
    assert pickle.loads(pickle.dumps(op)) is op is copy.deepcopy(op)
    assert dispatchers["attention"].op is op
