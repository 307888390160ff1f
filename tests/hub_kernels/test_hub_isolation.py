"""Two versions of one repository whose torch operations clash, serving in one process tree."""

from __future__ import annotations

import pytest
import torch
from hub_repositories import build

import layerzero as lz
from layerzero.integrations.hub import Hub, NamespaceClash
from layerzero.machine.isolation import pool as pools
from layerzero.spec.rules import equals

pytestmark = pytest.mark.usefixtures("world")
OPERATION = '''
import torch

torch.library.define("{id}::rms_norm", "(Tensor x, float eps) -> Tensor")


@torch.library.impl("{id}::rms_norm", "cpu")
def _norm(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * {version}


def rms_norm(x, eps=1e-6):
    return torch.ops.{id}.rms_norm(x, eps)


__all__ = ["rms_norm"]
'''


def test_two_versions_with_one_namespace_serve_beside_each_other(tmp_path):
    folders = {}
    for version in (1, 2):
        repository = tmp_path / f"v{version}"
        build(repository, version=version, id="_norm_shared", files={
            "__init__.py": OPERATION.format(id="_norm_shared", version=version)})
        folders[f"me/norm@{version}"] = repository
    hub = Hub(folders=folders, allow=("me/*",))
    plain = (equals("offset", 0.0), equals("dtype", "float32"))
    first, second = (hub.register("me/norm", "rms_norm", "rms_norm", version=version,
                                  requires=plain, certify=False) for version in (1, 2))
    x = torch.randn(4, 64)
    wanted = torch.rms_norm(x, (64,), None, 1e-6)
    torch.testing.assert_close(lz.rms_norm(x, backend=first.id), wanted)
    with pytest.raises(NamespaceClash):
        hub.load("me/norm", version=2)
    lz.configure(isolation=f"{second.id}=worker", isolation_memory=64 << 20)
    torch.testing.assert_close(lz.rms_norm(x, backend=f"worker.{second.id}"), 2 * wanted)
    torch.testing.assert_close(lz.rms_norm(x, backend=first.id), wanted)
    assert [p.name for p in pools.pools()] == ["me/norm@2"]
    pools.close_others(set())
