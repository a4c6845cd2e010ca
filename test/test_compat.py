"""Import paths and names of earlier releases: each leads to the right object; the classes made by a rule compute what their names say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from re import split
from typing import Any

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor, nn
from torch.nn import functional as F

import backpack as package
from backpack import CTX, backpack, compat, disable, extend, hook_run_extensions, hook_store_io, memory_cleanup, results
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.registry import registered
from backpack.core.derivatives.shape_check import check_shape
from backpack.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    layer_extensions,
    module_extensions,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.curvature import Curvature
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension, FirstOrderModuleExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.diag_ggn import BatchDiagGGN, DiagGGN
from backpack.extensions.secondorder.hbp import HBP, BackpropStrategy, ExpectationApproximation, LossHessianStrategy
from backpack.extensions.secondorder.sqrt_ggn import SqrtGGN

# Names of section 5 and 6 of the interface, of the tables of classes, and of the modules of functions. Braces list alternatives.
PATHS = {
    "": "backpack extend disable convert_module_to_backpack extensions hook_store_io hook_run_extensions memory_cleanup CTX BackpropExtension no_op "
    "is_no_op _register_hooks register",
    ".context": "CTX disable",
    ".extensions": "PCHMP GGNMP HMP BatchL2Grad BatchGrad SumGradSquared Variance KFAC KFLR KFRA HBP DiagGGNExact BatchDiagGGNExact DiagGGNMC "
    "BatchDiagGGNMC DiagHessian BatchDiagHessian SqrtGGNExact SqrtGGNMC firstorder secondorder curvmatprod",
    ".extensions.backprop_extension": "FAIL_ERROR FAIL_WARN FAIL_SILENT BackpropExtension",
    ".extensions.module_extension": "ModuleExtension",
    ".extensions.saved_quantities": "SavedQuantities",
    ".extensions.mat_to_mat_jac_base": "MatToJacMat",
    ".extensions.curvature": "Curvature ResidualModifications",
    ".extensions.firstorder": "BatchGrad BatchL2Grad SumGradSquared Variance",
    ".extensions.firstorder.base": "FirstOrderModuleExtension FirstOrderBackpropExtension",
    ".extensions.firstorder.batch_grad": "BatchGrad",
    ".extensions.firstorder.batch_grad.batch_grad_base": "BatchGradBase",
    ".extensions.firstorder.batch_l2_grad.batch_l2_base": "BatchL2Base",
    ".extensions.firstorder.sum_grad_squared.sgs_base": "SGSBase",
    ".extensions.firstorder.gradient.base": "GradBaseModule",
    ".extensions.firstorder.variance.variance_base": "VarianceBaseModule",
    ".extensions.secondorder": "DiagGGNExact DiagGGNMC DiagHessian SqrtGGNExact KFAC KFLR KFRA HBP",
    ".extensions.secondorder.base": "SecondOrderBackpropExtension",
    ".extensions.secondorder.diag_ggn": "DiagGGN BatchDiagGGN DiagGGNExact DiagGGNMC BatchDiagGGNExact BatchDiagGGNMC",
    ".extensions.secondorder.diag_ggn.diag_ggn_base": "DiagGGNBaseModule",
    ".extensions.secondorder.diag_hessian.diag_h_base": "DiagHBaseModule",
    ".extensions.secondorder.sqrt_ggn": "SqrtGGN SqrtGGNExact SqrtGGNMC",
    ".extensions.secondorder.sqrt_ggn.base": "SqrtGGNBaseModule",
    ".extensions.secondorder.sqrt_ggn.activations": "SqrtGGN{ReLU,Sigmoid,Tanh,LeakyReLU,LogSigmoid,ELU,SELU}",
    ".extensions.secondorder.sqrt_ggn.custom_module": "SqrtGGN{Identity,ScaleModule,SumModule}",
    ".extensions.secondorder.sqrt_ggn.dropout": "SqrtGGNDropout",
    ".extensions.secondorder.sqrt_ggn.flatten": "SqrtGGNFlatten",
    ".extensions.secondorder.sqrt_ggn.losses": "SqrtGGN{MSELoss,CrossEntropyLoss,BCEWithLogitsLoss}",
    ".extensions.secondorder.sqrt_ggn.pad": "SqrtGGNPad",
    ".extensions.secondorder.sqrt_ggn.padding": "SqrtGGNZeroPad2d",
    ".extensions.secondorder.sqrt_ggn.pooling": "SqrtGGN{MaxPool1d,MaxPool2d,MaxPool3d,AvgPool1d,AvgPool2d,AvgPool3d}",
    ".extensions.secondorder.sqrt_ggn.slicing": "SqrtGGNSlicing",
    ".extensions.secondorder.hbp": "HBP KFAC KFRA KFLR BackpropStrategy ExpectationApproximation LossHessianStrategy Curvature",
    ".extensions.secondorder.hbp.hbp_options": "BackpropStrategy ExpectationApproximation LossHessianStrategy",
    ".extensions.secondorder.hbp.hbpbase": "HBPBaseModule",
    ".extensions.secondorder.hbp.losses": "HBPLoss",
    ".extensions.firstorder.batch_grad.linear": "BatchGradLinear",
    ".extensions.firstorder.batch_grad.batchnorm_nd": "BatchGradBatchNormNd",
    ".extensions.firstorder.batch_grad.embedding": "BatchGradEmbedding",
    ".extensions.firstorder.batch_l2_grad.conv2d": "BatchL2Conv2d",
    ".extensions.firstorder.gradient.conv_transpose1d": "GradConvTranspose1d",
    ".extensions.firstorder.sum_grad_squared.linear": "SGSLinear",
    ".extensions.firstorder.variance.linear": "VarianceLinear",
    ".extensions.secondorder.diag_ggn.convnd": "DiagGGNConv{1,2,3}d",
    ".extensions.secondorder.diag_hessian.linear": "DiagHLinear",
    ".extensions.secondorder.hbp.linear": "HBPLinear",
    ".extensions.secondorder.sqrt_ggn.linear": "SqrtGGNLinear",
    ".extensions.curvmatprod.hmp.activations": "HMP{ReLU,Sigmoid}",
    ".extensions.curvmatprod": "HMP GGNMP PCHMP",
    ".extensions.curvmatprod.ggnmp.ggnmpbase": "GGNMPBase",
    ".extensions.curvmatprod.hmp.hmpbase": "HMPBase",
    ".extensions.curvmatprod.pchmp.pchmpbase": "PCHMPBase",
    ".core.layers": "Flatten",
    ".core.derivatives.shape_check": "check_shape",
    ".core.derivatives.basederivatives": "BaseDerivatives BaseParameterDerivatives BaseLossDerivatives",
    ".core.derivatives.elementwise": "ElementwiseDerivatives",
    ".core.derivatives.nll_base": "NLLLossDerivatives",
    ".core.derivatives.adaptive_avg_pool_nd": "AdaptiveAvgPoolNDDerivatives AdaptiveAvgPool{1,2,3}dDerivatives",
    ".core.derivatives.avgpoolnd": "AvgPoolNDDerivatives",
    ".core.derivatives.avgpool1d": "AvgPool1DDerivatives",
    ".core.derivatives.avgpool2d": "AvgPool2DDerivatives",
    ".core.derivatives.avgpool3d": "AvgPool3DDerivatives",
    ".core.derivatives.batchnorm_nd": "BatchNormNdDerivatives",
    ".core.derivatives.bcewithlogitsloss": "BCELossWithLogitsDerivatives",
    ".core.derivatives.convnd": "ConvNDDerivatives weight_jac_t_save_memory",
    ".core.derivatives.conv1d": "Conv1DDerivatives",
    ".core.derivatives.conv2d": "Conv2DDerivatives",
    ".core.derivatives.conv3d": "Conv3DDerivatives",
    ".core.derivatives.conv_transposend": "ConvTransposeNDDerivatives",
    ".core.derivatives.conv_transpose1d": "ConvTranspose1DDerivatives",
    ".core.derivatives.conv_transpose2d": "ConvTranspose2DDerivatives",
    ".core.derivatives.conv_transpose3d": "ConvTranspose3DDerivatives",
    ".core.derivatives.crossentropyloss": "CrossEntropyLossDerivatives",
    ".core.derivatives.dropout": "DropoutDerivatives",
    ".core.derivatives.elu": "ELUDerivatives",
    ".core.derivatives.embedding": "EmbeddingDerivatives",
    ".core.derivatives.flatten": "FlattenDerivatives",
    ".core.derivatives.leakyrelu": "LeakyReLUDerivatives",
    ".core.derivatives.linear": "LinearDerivatives",
    ".core.derivatives.logsigmoid": "LogSigmoidDerivatives",
    ".core.derivatives.lstm": "LSTMDerivatives",
    ".core.derivatives.maxpoolnd": "MaxPoolNDDerivatives",
    ".core.derivatives.maxpool1d": "MaxPool1DDerivatives",
    ".core.derivatives.maxpool2d": "MaxPool2DDerivatives",
    ".core.derivatives.maxpool3d": "MaxPool3DDerivatives",
    ".core.derivatives.mseloss": "MSELossDerivatives",
    ".core.derivatives.pad": "PadDerivatives",
    ".core.derivatives.permute": "PermuteDerivatives",
    ".core.derivatives.relu": "ReLUDerivatives",
    ".core.derivatives.rnn": "RNNDerivatives",
    ".core.derivatives.scale_module": "ScaleModuleDerivatives",
    ".core.derivatives.selu": "SELUDerivatives",
    ".core.derivatives.sigmoid": "SigmoidDerivatives",
    ".core.derivatives.slicing": "SlicingDerivatives",
    ".core.derivatives.sum_module": "SumModuleDerivatives",
    ".core.derivatives.tanh": "TanhDerivatives",
    ".core.derivatives.zeropad2d": "ZeroPad2dDerivatives",
    ".custom_module.branching": "Parallel SumModule _Branch",
    ".custom_module.graph_utils": "BackpackTracer convert_module_to_backpack",
    ".custom_module.pad": "Pad",
    ".custom_module.permute": "Permute",
    ".custom_module.reduce_tuple": "ReduceTuple",
    ".custom_module.scale_module": "ScaleModule",
    ".custom_module.slicing": "Slicing",
    ".hessianfree.ggnvp": "ggn_vector_product ggn_vector_product_from_plist",
    ".hessianfree.hvp": "hessian_vector_product",
    ".hessianfree.lop": "L_op transposed_jacobian_vector_product",
    ".hessianfree.rop": "R_op jacobian_vector_product",
    ".utils.conv": "get_conv_module get_conv_function unfold_input get_weight_gradient_factors extract_weight_diagonal extract_bias_diagonal "
    "unfold_by_conv _grad_input_padding",
    ".utils.conv_transpose": "get_conv_transpose_module get_conv_transpose_function get_weight_gradient_factors extract_weight_diagonal "
    "extract_bias_diagonal unfold_by_conv_transpose",
    ".utils.linear": "extract_weight_diagonal extract_bias_diagonal",
    ".utils.convert_parameters": "vector_to_parameter_list",
    ".utils.errors": "batch_norm_raise_error_if_train",
    ".utils.examples": "load_mnist_dataset get_mnist_dataloader load_one_batch_mnist autograd_diag_ggn_exact _autograd_ggn_exact_columns",
    ".utils.hooks": "no_op",
    ".utils.kroneckers": "kfacs_to_mat two_kfacs_to_mat kfac_mat_prod apply_kfac_mat_prod inv_kfac_mat_prod apply_inv_kfac_mat_prod inv_kfacs "
    "kfac_mat_prod_einsum_equation all_tensors_of_order is_tensor_of_order is_matrix is_vector get_letters",
    ".utils.unsqueeze": "kfacmp_unsqueeze_if_missing_dim",
    ".utils.module_classification": "is_loss is_nll is_no_op",
    ".utils.subsampling": "subsample",
}


def names_of(text: str) -> list[str]:
    return ["".join(parts) for word in text.split() for parts in product(*(part.split(",") for part in split("[{}]", word)))]


@pytest.mark.parametrize("path", PATHS)
def test_published_paths(path: str) -> None:
    """``from path import name`` gives an object that is called so; a class of derivatives that is registered, if it is about one layer."""
    for name in names_of(PATHS[path]):
        found: dict[str, Any] = {}
        exec(f"from backpack{path} import {name} as found", found)
        obj = found["found"]
        if isinstance(obj, type):
            assert obj.__name__ == name
            assert issubclass(obj, BaseDerivatives) == name.endswith("Derivatives")


def test_attribute_access_to_old_paths() -> None:
    """``import backpack.a.b`` and then ``backpack.a.b.name``, in a fresh interpreter, without files and without importing homes."""
    code = (
        "import sys, backpack.core.derivatives.relu, backpack.extensions.secondorder.hbp.losses as losses\n"
        "assert 'backpack.extensions.layer_extensions' not in sys.modules\n"
        "assert backpack.core.derivatives.relu.ReLUDerivatives.__module__ == 'backpack.core.derivatives.activations'\n"
        "assert issubclass(losses.HBPLoss, backpack.extensions.secondorder.hbp.hbpbase.HBPBaseModule)\n"
        "from backpack.core.derivatives import relu\n"
        "assert 'ReLUDerivatives' in dir(relu)\n"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], cwd=Path(__file__).parents[1], check=True)


def test_old_paths_hide_nothing() -> None:
    """No path of the table is a file, or an attribute that its parent had before; none occurs twice."""
    table = dict(compat.paths())
    assert len(table) == len(list(compat.paths()))
    root = Path(package.__file__).parent
    for path in table:
        file = root.joinpath(*path.split(".")[1:])
        assert not file.with_suffix(".py").exists()
        assert not file.is_dir()
        assert type(sys.modules[path]).__name__ == "_Moved"


def test_unknown_names() -> None:
    with pytest.raises(compat.MovedError, match=r"Nonsense.*relu.*\[backpack:moved\]"):
        from backpack.core.derivatives.relu import Nonsense  # noqa: F401
    with pytest.raises(compat.MovedError, match=r"SqrtGGNNonsense.*register.*\[backpack:moved\]"):
        from backpack.extensions.secondorder.sqrt_ggn.activations import SqrtGGNNonsense  # noqa: F401
    with pytest.raises(ImportError, match="nowhere"):
        import backpack.core.derivatives.nowhere  # noqa: F401
    moved = compat._Moved("backpack.old", "backpack.future")
    with pytest.raises(ImportError, match=r"backpack.old.Name should live in backpack.future.*\[backpack:moved\]"):
        moved.Name  # noqa: B018
    assert not hasattr(moved, "__file__")


# --- classes made by a rule -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", layer_extensions.FAMILIES)
def test_class_for_each_module(family: str) -> None:
    """Constructed without arguments; a method for each parameter; can be subclassed."""
    for module_class, rule in registered().items():
        if not module_class.__module__.startswith(("torch.", "backpack.")):
            continue
        cls = getattr(layer_extensions, family + module_class.__name__)
        assert cls is getattr(layer_extensions, family + module_class.__name__)
        made = type("Mine", (cls,), {})()
        assert isinstance(made, ModuleExtension)
        assert made.params == tuple(rule.params)
        assert all(callable(getattr(made, name)) for name in rule.params)


N = 4


class Spelled(nn.Linear):
    """A layer of the user's that is not recognized by its class."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.bias


def test_class_for_a_layer_of_ones_own() -> None:
    """As in code that reuses what is there for a layer that is like its base."""
    from backpack.extensions.firstorder.batch_grad.linear import BatchGradLinear

    def special() -> Problem:
        return build(lambda: nn.Sequential(Spelled(4, 3), nn.Sigmoid(), Spelled(3, 3)))

    problem, extension = special(), FirstOrderBackpropExtension("own")
    extension.set_module_extension(Spelled, BatchGradLinear())
    run(problem, extension)
    check(problem, "own", Oracle(special()).grad_batch)


class Branching(nn.Module):
    """Branches without functional code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 3)
        self.sum, self.slope, self.last = package.custom_module.branching.SumModule(), nn.PReLU(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        return self.last(self.slope(self.sum(x, self.second(x))))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


def build(make: Callable[[], nn.Module] = chain, loss: type[nn.Module] = nn.CrossEntropyLoss) -> Problem:
    torch.manual_seed(3)
    model = make().double()
    target = torch.randint(3, (N,)) if loss is nn.CrossEntropyLoss else torch.randn(N, 3, dtype=torch.float64)
    return Problem(model, torch.randn(N, 4, dtype=torch.float64), [Term(loss(), target)])


def run(problem: Problem, *active: BackpropExtension, factor: float = 1.0) -> None:
    for module in (problem.model, *problem.losses):
        extend(module)
    torch.manual_seed(1)
    with backpack(*active):
        (factor * problem.loss(problem.outputs())).backward()


def values(problem: Problem, field: str) -> dict[str, Any]:
    return {name: fields[field] for name, fields in results(problem.model).items() if field in fields}


def entries(family: str) -> dict[type[nn.Module], ModuleExtension]:
    return {cls: getattr(layer_extensions, family + cls.__name__)() for cls in registered() if cls.__module__.startswith(("torch.", "backpack."))}


def check(problem: Problem, field: str, expected: dict[str, Tensor]) -> None:
    found = values(problem, field)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        close(value, expected[name])


@pytest.mark.parametrize("make", [chain, Branching])
@pytest.mark.parametrize("chosen", [None, [2, 0, 2]], ids=str)
def test_first_order_families(make: Callable[[], nn.Module], chosen: list[int] | None) -> None:
    problem = build(make)
    families = ["BatchGrad", "BatchL2", "SGS", "Grad", "Variance"]
    run(problem, *(FirstOrderBackpropExtension(f"of_{family}", entries(family), "ERROR", chosen) for family in families))
    gradients = {name: g if chosen is None else g[chosen] for name, g in Oracle(build(make)).grad_batch.items()}
    check(problem, "of_BatchGrad", gradients)
    check(problem, "of_BatchL2", {name: g.flatten(1).square().sum(1) for name, g in gradients.items()})
    check(problem, "of_SGS", {name: g.square().sum(0) for name, g in gradients.items()})
    check(problem, "of_Grad", {name: g.sum(0) for name, g in gradients.items()})
    check(problem, "of_Variance", {name: g.var(0, correction=0) for name, g in gradients.items()})


class Assembled(SecondOrderBackpropExtension):
    """An extension as other libraries assemble it."""

    def __init__(self, family: str, strategy: str = LossHessianStrategy.EXACT, subsampling: list[int] | None = None) -> None:
        super().__init__(savefield=f"of_{family}", fail_mode="ERROR", module_exts=entries(family), subsampling=subsampling)
        self.strategy = strategy

    def get_loss_hessian_strategy(self) -> str:
        return self.strategy

    def get_num_mc_samples(self) -> int:
        return 3

    def get_modification_mode(self) -> str:
        return "abs"

    @staticmethod
    def accumulate_backpropagated_quantities(existing: Tensor, other: Tensor) -> Tensor:
        return existing + other


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss])
@pytest.mark.parametrize("make", [chain, Branching])
def test_families_of_the_generalized_gauss_newton(make: Callable[[], nn.Module], loss: type[nn.Module]) -> None:
    problem = build(make, loss)
    run(problem, SqrtGGNExact(), *(Assembled(family) for family in ("SqrtGGN", "DiagGGN", "BatchDiagGGN")), factor=2.5)
    oracle = Oracle(build(make, loss))
    diagonals = {name: 2.5 * d for name, d in oracle.diag_ggn_batch(oracle.hessian_exact).items()}
    check(problem, "of_BatchDiagGGN", diagonals)
    check(problem, "of_DiagGGN", sum_batch(diagonals))
    check(problem, "of_SqrtGGN", values(problem, "sqrt_ggn_exact"))


@pytest.mark.parametrize("chosen", [None, [2, 0]], ids=str)
def test_sampled_square_root(chosen: list[int] | None) -> None:
    """The same draw as the library's own, one after the other under the same seed."""
    problem, other = build(), build()
    run(problem, Assembled("SqrtGGN", LossHessianStrategy.SAMPLING, chosen), factor=0.5)
    run(other, SqrtGGNMC(mc_samples=3, subsampling=chosen), factor=0.5)
    check(problem, "of_SqrtGGN", values(other, "sqrt_ggn_mc"))


def test_subsampled_square_root() -> None:
    problem, chosen = build(Branching), [3, 1, 1]
    run(problem, Assembled("SqrtGGN", subsampling=chosen), SqrtGGNExact(subsampling=chosen))
    check(problem, "of_SqrtGGN", values(problem, "sqrt_ggn_exact"))


@pytest.mark.parametrize("chosen", [None, [0], [2, 1, 0], [1, 1, 1], [-1, 3], list(range(N))[::-1]], ids=str)
def test_families_of_the_hessian(chosen: list[int] | None) -> None:
    problem = build()
    run(problem, Assembled("DiagH", subsampling=chosen), Assembled("BatchDiagH", subsampling=chosen), factor=2.5)
    diagonals = {name: 2.5 * (d if chosen is None else d[chosen]) for name, d in Oracle(build()).diag_h_batch.items()}
    check(problem, "of_DiagH", sum_batch(diagonals))
    check(problem, "of_BatchDiagH", diagonals)


class AssembledHBP(HBP):
    """Hessian backpropagation with module extensions, which take the place of the library's rules."""

    def __init__(self, *strategies: str) -> None:
        super().__init__(*strategies, savefield="of_hbp")
        for cls, entry in entries("HBP").items():
            self.set_module_extension(cls, entry)

    @property
    def flow(self) -> None:
        return None


@pytest.mark.parametrize("library", [KFAC, KFLR, KFRA])
def test_hessian_backpropagation(library: type[HBP]) -> None:
    ext, problem = library(), build()
    mine = AssembledHBP(ext.get_curv_type(), ext.get_loss_hessian_strategy(), ext.get_backprop_strategy(), ext.get_ea_strategy())
    run(problem, mine)
    expected = build()
    run(expected, ext)
    for name, factors in values(expected, ext.savefield).items():
        for found, factor in zip(values(problem, "of_hbp")[name], factors, strict=True):
            close(found, factor)


def test_hessian_backpropagation_of_the_hessian() -> None:
    strategies = Curvature.HESSIAN, LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE, ExpectationApproximation.BOTEV_MARTENS
    problem, expected = build(), build()
    run(problem, AssembledHBP(*strategies))
    run(expected, HBP(*strategies))
    for name, factors in values(expected, "hbp").items():
        for found, factor in zip(values(problem, "of_hbp")[name], factors, strict=True):
            close(found, factor)


@pytest.mark.parametrize("library", [GGNMP, HMP, lambda: PCHMP(modify="abs")], ids=["GGNMP", "HMP", "PCHMP"])
def test_products(library: Callable[[], BackpropExtension]) -> None:
    ext, problem = library(), build()
    run(problem, Assembled(type(ext).__name__), ext)
    ours, theirs = values(problem, f"of_{type(ext).__name__}"), values(problem, ext.savefield)
    assert ours.keys() == theirs.keys() == dict(problem.model.named_parameters()).keys()
    for name, param in problem.model.named_parameters():
        mat = torch.randn(2, *param.shape, dtype=torch.float64)
        close(ours[name](mat).detach(), theirs[name](mat).detach())
        close(ours[name](mat[0]).detach(), theirs[name](mat[0]).detach())


def test_class_in_an_extension_of_the_library() -> None:
    """A subclass, set for one module class, receives what the library's own flow carries: chosen samples, signs."""

    class Doubled(layer_extensions.DiagHLinear):
        def weight(self, *args: Any) -> Tensor:
            return 2 * self._diagonal("weight", *args)

    class Same(layer_extensions.SqrtGGNLinear):
        pass

    problem, hessian, root = build(), DiagHessian(subsampling=[1, 3]), SqrtGGNMC(mc_samples=2, subsampling=[1, 3])
    hessian.set_module_extension(nn.Linear, Doubled())
    root.set_module_extension(nn.Linear, Same())
    run(problem, hessian, root)
    expected = build()
    run(expected, DiagHessian(subsampling=[1, 3]), SqrtGGNMC(mc_samples=2, subsampling=[1, 3]))
    check(problem, "diag_h", {name: (2 if "weight" in name else 1) * d for name, d in values(expected, "diag_h").items()})
    check(problem, "sqrt_ggn_mc", values(expected, "sqrt_ggn_mc"))


@pytest.mark.parametrize("base", [module_extensions.BatchGradBase, module_extensions.SqrtGGNBaseModule, module_extensions.GradBaseModule])
def test_constructor_of_bases(base: Any) -> None:
    class Mine(base):
        def __init__(self) -> None:
            super().__init__(LinearDerivatives(), ["weight", "bias"])

        def bias(self, ext: Any, module: nn.Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> str:  # noqa: N803
            return "mine"

    mine = Mine()
    assert mine.bias(None, None, (), (), None) == "mine"
    assert callable(mine.weight)


def test_constructors_with_other_orders() -> None:
    assert module_extensions.BatchL2Base(["bias"], LinearDerivatives()).params == ("bias",)
    assert module_extensions.BatchL2Base(params=["bias"], derivatives=LinearDerivatives()).params == ("bias",)
    for missing in (
        lambda: module_extensions.BatchL2Base(["bias"]),
        lambda: module_extensions.DiagGGNBaseModule(LinearDerivatives(), ["weight"]),
        lambda: module_extensions.MatToJacMat(LinearDerivatives(), ["weight"]),
    ):
        with pytest.raises(NotImplementedError, match="no method"):
            missing()
    assert module_extensions.MatToJacMat(LinearDerivatives()).params == ()
    assert (module_extensions.DiagHBaseModule.PLUS, module_extensions.DiagHBaseModule.MINUS, module_extensions.SGSBase.N_axis) == (1.0, -1.0, 0)
    close(module_extensions.VarianceBaseModule._variance_from(torch.tensor([4.0]), torch.tensor([10.0]), 2), torch.tensor([1.0]))


def test_list_of_columns() -> None:
    linear, x = extend(nn.Linear(3, 2)), torch.randn(N, 3, requires_grad=True)
    linear(x).sum()
    linear.input0, linear.output = x, linear(x)
    mats = [torch.randn(2, N, 2), torch.randn(1, N, 2)]
    found = module_extensions.MatToJacMat(LinearDerivatives()).backpropagate(BatchGrad(), linear, (None,), (mats[0][0],), mats)
    for result, mat in zip(found, mats, strict=True):
        close(result.detach(), mat @ linear.weight.detach())


# --- extensions -------------------------------------------------------------------------------------------------------------------------------


def test_published_constructors_of_the_square_root_extensions() -> None:
    class Three(SqrtGGN):
        def get_num_mc_samples(self) -> int:
            return 3

    problem = build()
    run(problem, DiagGGN(LossHessianStrategy.EXACT, "diagonal"), BatchDiagGGN("exact", savefield="diagonals"), Three("sampling", "root", None))
    oracle = Oracle(build())
    diagonals = oracle.diag_ggn_batch(oracle.hessian_exact)
    check(problem, "diagonal", sum_batch(diagonals))
    check(problem, "diagonals", diagonals)
    other = build()
    run(other, SqrtGGNMC(mc_samples=3))
    check(problem, "root", values(other, "sqrt_ggn_mc"))
    assert DiagGGN.VALID_LOSS_HESSIAN_STRATEGIES == ["exact", "sampling"]
    assert DiagGGNExact().loss_hessian_strategy == SqrtGGNExact().get_loss_hessian_strategy() == LossHessianStrategy.EXACT
    assert SqrtGGNMC().get_loss_hessian_strategy() == LossHessianStrategy.SAMPLING
    with pytest.raises(ValueError, match="exact.*sampling"):
        DiagGGN(LossHessianStrategy.SUM, "no")


def test_saved_quantities() -> None:
    """A plain dictionary, not empty while a pass under way carries something, and empty afterwards, also after a failure."""
    seen = []

    class Spy(layer_extensions.SqrtGGNLinear):
        def weight(self, ext: Any, *args: Any) -> Tensor:
            seen.append(len(ext.saved_quantities._saved_quantities))
            if len(seen) > 3:  # noqa: PLR2004
                raise ZeroDivisionError
            return super().weight(ext, *args) if hasattr(super(), "weight") else 0

    ext, problem = Assembled("SqrtGGN"), build()
    ext.set_module_extension(nn.Linear, Spy(), overwrite=True)
    assert type(ext.saved_quantities._saved_quantities) is dict
    run(problem, ext)
    assert min(seen) > 0
    assert not ext.saved_quantities._saved_quantities
    with pytest.raises(ZeroDivisionError):
        run(problem, ext)
    assert not ext.saved_quantities._saved_quantities


def test_extensions_called_by_hand() -> None:
    """``ext(module, g_inp, g_out)`` in the order of a backward pass, or as the hooks of earlier releases do it."""
    problem, ext, first = build(), Assembled("DiagGGN"), FirstOrderBackpropExtension("of_BatchGrad", entries("BatchGrad"))
    for module in (problem.model, *problem.losses):
        extend(module)
    x = problem.x.requires_grad_()
    outputs, hidden = [], x
    for layer in problem.model:
        hidden = layer(hidden)
        outputs.append(hidden)
    loss = problem.losses[0](hidden, problem.terms[0].target)
    grads = torch.autograd.grad(loss, outputs, retain_graph=True)
    with torch.no_grad(), backpack(ext, first):  # as inside of a backward pass
        hook_run_extensions(problem.losses[0], (None,), (torch.ones((), dtype=torch.float64),))
        for layer, grad in reversed(list(zip(problem.model, grads, strict=True))):
            assert layer.output.shape == grad.shape
            hook_run_extensions(layer, (None,), (grad,))
            assert not hasattr(layer, "output")
    oracle = Oracle(build())
    check(problem, "of_DiagGGN", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))
    check(problem, "of_BatchGrad", oracle.grad_batch)
    kept = problem.model(x)
    assert kept.requires_grad
    with pytest.raises(AssertionError, match="of_DiagGGN"):
        Assembled("DiagGGN")(problem.model[0], (None,), (grads[0],))
    with pytest.raises(NotImplementedError, match=r"^Extension saving to nothing .*Linear"):
        FirstOrderBackpropExtension("nothing", {}, "ERROR")(problem.model[0], (None,), (grads[0],))


# --- hooks and state --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("extended", [False, True])
def test_hooks_installed_by_hand(extended: bool) -> None:
    """As in code that has its own ``extend``; nothing is counted twice."""
    problem, visited = build(), []
    for module in (problem.model, *problem.losses):
        if extended:
            extend(module)
        for child in module.modules():
            if not package.is_no_op(child):
                CTX.add_hook_handle(child.register_forward_hook(hook_store_io))
                CTX.add_hook_handle(child.register_full_backward_hook(hook_run_extensions))
    with backpack(BatchGrad(), DiagGGNExact(), extension_hook=visited.append):
        problem.loss(problem.outputs()).backward()
    oracle = Oracle(build())
    check(problem, "grad_batch", oracle.grad_batch)
    check(problem, "diag_ggn_exact", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))
    assert len(visited) == len(set(visited)) == 6
    CTX.remove_hooks()
    assert CTX.hook_handles == []
    assert not any(module._forward_hooks or module._backward_hooks for module in problem.model.modules())


def test_register_hooks() -> None:
    layer, x = nn.Linear(2, 3), torch.randn(N, 2)
    package._register_hooks(layer)
    output = layer(x)
    assert layer.input0.data_ptr() == x.data_ptr()
    assert torch.equal(layer.output, output)
    memory_cleanup(layer)
    assert not hasattr(layer, "input0")


@pytest.mark.parametrize("reset", ["False", "delete"])
@pytest.mark.parametrize("removed", [False, True])
def test_extend_again(reset: str, removed: bool) -> None:
    """With the flag reset, hooks are installed afresh: once, whether or not the old ones were removed."""
    problem = build()
    for _ in range(2):
        for module in (problem.model, *problem.losses):
            extend(module)
        with backpack(BatchGrad(), DiagGGNExact()):
            problem.loss(problem.outputs()).backward()
        if removed:
            CTX.remove_hooks()
        for module in (*problem.model.modules(), *problem.losses):
            if reset == "False":
                module._backpack_extend = False
            elif hasattr(module, "_backpack_extend"):
                del module._backpack_extend
    oracle = Oracle(build())
    check(problem, "grad_batch", oracle.grad_batch)
    check(problem, "diag_ggn_exact", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))
    extend(problem.model)
    assert [len(child._forward_hooks) for child in problem.model] == [1] * 5


def test_state_as_attributes() -> None:
    hook = [].append
    assert (CTX.active_exts, CTX.debug, CTX.extension_hook, CTX.retain_graph, CTX.hook_handles) == ((), False, package.no_op, False, [])
    with backpack(ext := BatchGrad(), extension_hook=hook, retain_graph=True):
        assert (CTX.active_exts, CTX.extension_hook, CTX.retain_graph) == ((ext,), hook, True)
    assert disable.store_io
    with disable():
        assert not disable.store_io
        assert not disable.should_store_io()
    disable.store_io = False
    try:
        assert not disable.should_store_io()
    finally:
        disable.store_io = True


def test_operations_in_place() -> None:
    """What an operation in place has overwritten is not asked for by derivatives that do not read it."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))

    problem = build(net)
    active = [Assembled(family) for family in ("SqrtGGN", "DiagGGN", "DiagH")]
    run(problem, FirstOrderBackpropExtension("of_BatchGrad", entries("BatchGrad")), *active)
    oracle = Oracle(build(net))
    check(problem, "of_BatchGrad", oracle.grad_batch)
    check(problem, "of_DiagGGN", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))
    check(problem, "of_DiagH", sum_batch(oracle.diag_h_batch))


class Functional(nn.Module):
    """Something without a module."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5


@pytest.mark.parametrize("before", [nn.Sigmoid, Functional], ids=["module", "function"])
def test_rules_of_users_read_any_tensor(before: Callable[[], nn.Module]) -> None:
    """Of an activation the library keeps only what its own rule needs, but not where a user's rule may need more."""
    seen = {}

    class Spy(FirstOrderModuleExtension):
        def check_hyperparameters_module_extension(self, ext: Any, module: nn.Module, g_inp: tuple, g_out: tuple) -> None:
            seen.update(input=module.input0, output=module.output)

    problem = build(lambda: nn.Sequential(nn.Linear(4, 3), before(), nn.ReLU()), nn.MSELoss)
    run(problem, FirstOrderBackpropExtension("anything", {nn.ReLU: Spy()}, "SILENT"))
    model = problem.model
    close(seen["input"], model[1](model[0](problem.x)).detach())
    close(seen["output"], model(problem.x).detach())


# --- private names that existing code touches --------------------------------------------------------------------------------------------------


def test_private_names() -> None:
    loss = nn.MSELoss()
    loss.input0, loss.input1 = torch.randn(N, 2), torch.randn(N, 2)
    loss.output = loss(loss.input0, loss.input1)
    derivatives = MSELossDerivatives()
    assert derivatives.use_autograd is False
    manual, autograd = [], []
    for use_autograd, samples in ((False, manual), (True, autograd)):
        derivatives.use_autograd = use_autograd
        torch.manual_seed(0)
        samples.append(derivatives.sqrt_hessian_sampled(loss, None, None, mc_samples=5))
    close(manual[0].abs(), autograd[0].abs(), rtol=1e-5)  # the sign has no meaning
    assert derivatives._make_distribution(loss.input0).sample(torch.Size([3])).shape == (3, N, 2)
    check_shape(torch.zeros(7, N, 2), loss.input0)
    with pytest.raises(RuntimeError, match="shape"):
        check_shape(torch.zeros(7, N, 3), loss.input0, diff=1)
    linear = nn.Linear(4, 3)
    linear.input0 = torch.randn(N, 2, 5, 4)
    assert tuple(LinearDerivatives._get_additional_dims(linear)) == (2, 5)


def test_derivatives_of_a_number_are_those_of_an_identity() -> None:
    from backpack.core.derivatives.scale_module import ScaleModuleDerivatives

    from backpack.custom_module.scale_module import ScaleModule

    mat = torch.rand(2, 3, 4)
    for module, factor in ((nn.Identity(), 1.0), (ScaleModule(0.5), 0.5)):
        module.input0 = module.output = torch.rand(3, 4)
        assert torch.equal(ScaleModuleDerivatives().jac_t_mat_prod(module, None, None, mat), factor * mat)
