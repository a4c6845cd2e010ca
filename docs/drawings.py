"""Drawings of the documentation: every coloured cell is a number that the package has computed for a small network.

They are written into the pages, not linked from them, so that they follow the theme: see ``drawing`` in ``_static/site.css``.
"""

from collections.abc import Iterator
from html import escape
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from backpack import backpack, extend
from backpack.extensions import KFLR, BatchGrad, BatchL2Grad, DiagGGNExact, SqrtGGNExact, Variance
from backpack.utils.kroneckers import two_kfacs_to_mat

GAP = 6


class Drawing:
    """Matrices of coloured cells, and text, in one picture."""

    def __init__(self, title: str) -> None:
        self.title, self.parts, self.width, self.height = title, [], 0.0, 0.0

    def cells(self, x: float, y: float, matrix: Tensor, size: float, columns: list[int] | None = None, rows: list[int] | None = None) -> "Drawing":
        """Colour cells by sign, and by the square root of their magnitude; groups of rows and columns are set apart."""
        strength = (matrix.abs() / matrix.abs().max()).sqrt()
        places = [x + size * j + GAP * gap for j, gap in enumerate(groups(columns or [matrix.shape[1]]))]
        heights = [y + size * i + GAP * gap for i, gap in enumerate(groups(rows or [matrix.shape[0]]))]
        for i, top in enumerate(heights):
            for j, left in enumerate(places):
                kind = "plus" if matrix[i, j] >= 0 else "minus"
                box = f'x="{left:.1f}" y="{top:.1f}" width="{size - 1}" height="{size - 1}"'
                self.parts.append(f'<rect class="{kind}" fill-opacity="{max(float(strength[i, j]), 0.05):.2f}" {box}/>')
        return self.grow(places[-1] + size, heights[-1] + size)

    def frame(self, x: float, y: float, width: float, height: float) -> "Drawing":
        """Outline a part of a matrix."""
        self.parts.append(f'<rect class="frame" x="{x - 0.5:.1f}" y="{y - 0.5:.1f}" width="{width:.1f}" height="{height:.1f}"/>')
        return self

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> "Drawing":
        """Write a line."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>')
        return self.grow(x + {"start": 8.0, "middle": 4.0, "end": 0}[anchor] * len(words), y + 4)

    def grow(self, width: float, height: float) -> "Drawing":
        self.width, self.height = max(self.width, width), max(self.height, height)
        return self

    def __str__(self) -> str:
        size = f'viewBox="-1 -1 {self.width + 2:.0f} {self.height + 2:.0f}" style="width: {self.width + 2:.0f}px"'
        head = f'<div class="drawing"><svg xmlns="http://www.w3.org/2000/svg" role="img" {size}><title>{escape(self.title)}</title>'
        return "\n".join([head, *self.parts, "</svg></div>"])


def groups(sizes: list[int]) -> Iterator[int]:
    """The number of the group of each entry."""
    return (group for group, size in enumerate(sizes) for _ in range(size))


class Numbers:
    """One backward pass of a small network, and matrices of curvature made of it."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
            X, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(3, (8,))
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.5)
        model, lossfunc = extend(net), extend(nn.CrossEntropyLoss())
        with backpack(BatchGrad(), BatchL2Grad(), Variance(), DiagGGNExact(), SqrtGGNExact(), KFLR()):
            lossfunc(model(X), y).backward()
        self.named = dict(model.named_parameters())
        self.parameters = list(self.named.values())
        self.sizes = [p.numel() for p in self.parameters]
        self.starts = [0, *accumulate(self.sizes)]

        def loss(vector: Tensor) -> Tensor:
            tensors = {name: part.view_as(p) for (name, p), part in zip(self.named.items(), vector.split(self.sizes), strict=True)}
            return nn.functional.cross_entropy(torch.func.functional_call(model, tensors, (X,)), y)

        self.root = torch.cat([p.sqrt_ggn_exact.flatten(0, 1).flatten(1) for p in self.parameters], 1)
        self.ggn = self.root.T @ self.root
        self.hessian = torch.autograd.functional.hessian(loss, torch.cat([p.detach().flatten() for p in self.parameters]))

    def row(self, field: str) -> Tensor:
        """What parameters carry, side by side."""
        return torch.cat([getattr(p, field).detach().flatten() for p in self.parameters])[None]

    def place(self, number: int, size: float) -> float:
        """Where a parameter begins, in a picture with cells of a size."""
        return size * self.starts[number] + GAP * number


def inside(n: Numbers, curvature: bool) -> Drawing:
    """The gradients of the samples, and what is made of them."""
    size, left = 14, 132
    width = n.place(4, size) - GAP
    drawing = Drawing("Per-sample gradients of a small network, and what is made of them")
    for number, name in enumerate(n.named):
        drawing.text(left + n.place(number, size), 12, name, kind="small")
    per_sample = torch.cat([p.grad_batch.flatten(1) for p in n.parameters], 1)
    drawing.cells(left, 20, per_sample, size, n.sizes).text(left - 10, 70, "grad_batch", "end").text(left - 10, 86, "8 samples", "end", "small")
    right = left + width + 16
    drawing.text(right, 12, "batch_l2").cells(right, 20, torch.stack([p.batch_l2 for p in n.parameters], 1), size)
    y = 20 + 8 * size + 14
    rows = [("grad", "their sum"), ("variance", "their spread"), *([("diag_ggn_exact", "curvature")] if curvature else [])]
    for field, what in rows:
        drawing.cells(left, y, n.row(field), size, n.sizes).text(left - 10, y + 11, "." + field, "end").text(right, y + 11, what, kind="small")
        y += size + 10
    return drawing


def square(drawing: Drawing, n: Numbers, x: float, y: float, matrix: Tensor, size: float, title: str) -> float:
    """A matrix of all parameters, with its diagonal outlined; return where it ends."""
    drawing.text(x, y - 8, title).cells(x, y, matrix, size, n.sizes, n.sizes)
    for number, (start, count) in enumerate(zip(n.starts, n.sizes, strict=False)):
        for k in range(start, start + count):
            at = size * k + GAP * number
            drawing.frame(x + at, y + at, size, size)
    return x + n.place(4, size)


def ggn(n: Numbers) -> Drawing:
    """The square root, the matrix, and its diagonal."""
    drawing, size, y = Drawing("A square root of the Gauss-Newton matrix, the matrix, and its diagonal"), 8, 24
    drawing.text(0, y - 8, "U: sqrt_ggn_exact").cells(0, y, n.root, size, n.sizes, [8, 8, 8])
    x = n.place(4, size) + 34
    drawing.text(x - 22, y + 110, "→", "middle")
    end = square(drawing, n, x, y, n.ggn, size, "G = Uᵀ U, diagonal outlined")
    drawing.text(end + 16, y - 8, "diag_ggn_exact")
    for number, (p, start) in enumerate(zip(n.parameters, n.starts, strict=False)):
        drawing.cells(end + 16, y + size * start + GAP * number, p.diag_ggn_exact.detach().reshape(-1, 1), size)
    return drawing


def hessian(n: Numbers) -> Drawing:
    """The Hessian beside the generalized Gauss-Newton."""
    drawing, size, y = Drawing("The Hessian and the generalized Gauss-Newton of the same network"), 9, 24
    end = square(drawing, n, 0, y, n.hessian, size, "Hessian: its diagonal is diag_h")
    square(drawing, n, end + 30, y, n.ggn, size, "generalized Gauss-Newton")
    return drawing


def kronecker(n: Numbers) -> Drawing:
    """A block, and the product of its factors."""
    drawing, size, y, weight = Drawing("A block of the Gauss-Newton matrix, and its Kronecker factors"), 13, 24, n.parameters[0]
    outputs, inputs = weight.kflr
    block = n.ggn[: n.sizes[0], : n.sizes[0]]
    drawing.text(0, y - 8, "block of 0.weight").cells(0, y, block, size)
    x = 12 * size + 24
    drawing.text(x, y + 80, "≈").text(x + 26, y - 8, "B").cells(x + 26, y + 50, outputs, size)
    drawing.text(x + 92, y + 80, "⊗").text(x + 116, y - 8, "A").cells(x + 116, y + 56, inputs, size)
    x += 172
    drawing.text(x, y + 80, "=").cells(x + 26, y, two_kfacs_to_mat(outputs, inputs), size).text(x + 26, y - 8, "B ⊗ A")
    return drawing


def products(n: Numbers) -> Drawing:
    """Blocks of the diagonal, and a product with one of them."""
    drawing, size, y = Drawing("The blocks with which curvature products multiply"), 9, 24
    drawing.text(0, y - 8, "blocks of G").cells(0, y, n.ggn, size, n.sizes, n.sizes)
    for number, count in enumerate(n.sizes):
        at = n.place(number, size)
        drawing.frame(at, y + at, size * count, size * count)
    x, at, count = n.place(4, size) + 24, n.place(2, size), n.sizes[2]
    block = n.ggn[n.starts[2] : n.starts[3], n.starts[2] : n.starts[3]]
    vector = torch.linspace(-1, 1, count, dtype=torch.float64)[:, None]
    names = list(n.named)
    drawing.text(x, y + at - 8, f"p = {names[2]}").cells(x, y + at, block, size)
    drawing.text(x + count * size + 12, y + at - 8, "v").cells(x + count * size + 12, y + at, vector, size)
    drawing.text(x + count * size + 36, y + at + 60, "=").text(x + count * size + 60, y + at - 8, "p.ggnmp(v)")
    return drawing.cells(x + count * size + 60, y + at, block @ vector, size)


def write(folder: Path) -> None:
    """Write all drawings."""
    n = Numbers()
    drawings = {"inside": inside(n, True), "first_order": inside(n, False), "ggn": ggn(n), "hessian": hessian(n)}
    for name, drawing in (drawings | {"kronecker": kronecker(n), "products": products(n)}).items():
        (folder / f"{name}.svg").write_text(str(drawing))
