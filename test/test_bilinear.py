"""Bilinear layers: products with their Jacobians, which are others for each sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backpack import backpack, extend
from backpack.core.derivatives.bilinear import BilinearDerivatives
from backpack.extensions import KFRA


def test_second_input_of_chosen_samples() -> None:
    torch.manual_seed(0)
    layer, mat = extend(nn.Bilinear(3, 2, 4).double()), torch.randn(2, 2, 4, dtype=torch.float64)
    first, second = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    _out = layer(first, second)  # what is recorded lives as long as the output
    expected = torch.einsum("vno,nj,oij->vni", mat, second[[3, 1]], layer.weight)
    torch.testing.assert_close(BilinearDerivatives().jac_t_mat_prod(layer, None, None, mat, subsampling=[3, 1]), expected)


def test_recursion_through_another_jacobian_for_each_sample() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Bilinear(3, 2, 4)

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return self.second(self.first(x), z)

    model, lossfunc = extend(Model().double()), extend(nn.MSELoss(reduction="sum"))
    x, z = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    with backpack(KFRA(exclude=[model.second])):
        lossfunc(model(x, z), torch.zeros(5, 4, dtype=torch.float64)).backward()
    jacobians = torch.einsum("oij,nj->noi", model.second.weight.detach(), z)
    torch.testing.assert_close(model.first.weight.kfra[0], 2 * torch.einsum("noi,noj->ij", jacobians, jacobians))
