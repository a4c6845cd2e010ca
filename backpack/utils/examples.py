"""Helpers for examples: handwritten digits from MNIST's own files, and the exact GGN diagonal by plain automatic differentiation."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, TensorDataset

from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.errors import ArgumentError

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081


def load_mnist_dataset(root: str | Path = "./data", train: bool = True) -> TensorDataset:
    """Load MNIST from the four IDX files that it is distributed in; nothing is downloaded.

    Args:
        root: Folder with the files, raw or compressed (``.gz``). They may also lie in its sub-folder ``MNIST/raw``.
        train: Load the training set, else the test set.

    Returns:
        Data set of normalized images ``[1, 28, 28]`` and labels.
    """
    prefix = "train" if train else "t10k"
    images = _read_idx(_find(Path(root), f"{prefix}-images-idx3-ubyte"))
    labels = _read_idx(_find(Path(root), f"{prefix}-labels-idx1-ubyte"))
    return TensorDataset(images.float().div(255).sub(MNIST_MEAN).div(MNIST_STD).unsqueeze(1), labels.long())


def get_mnist_dataloader(batch_size: int = 64, shuffle: bool = True, root: str | Path = "./data") -> DataLoader:
    """Return mini-batches of MNIST's training set.

    Args:
        batch_size: Number of samples ``N`` in a mini-batch.
        shuffle: Draw the samples in random order.
        root: Folder with the files, see ``load_mnist_dataset``.

    Returns:
        Loader of images ``[N, 1, 28, 28]`` and labels ``[N]``.
    """
    return DataLoader(load_mnist_dataset(root), batch_size=batch_size, shuffle=shuffle)


def load_one_batch_mnist(batch_size: int = 64, shuffle: bool = True, flat: bool = False, root: str | Path = "./data") -> tuple[Tensor, Tensor]:
    """Return one mini-batch of MNIST's training set.

    Args:
        batch_size: Number of samples ``N``.
        shuffle: Draw the samples in random order.
        flat: Return each image as a vector.
        root: Folder with the files, see ``load_mnist_dataset``.

    Returns:
        Images ``[N, 1, 28, 28]`` (``[N, 784]`` if ``flat``) and labels ``[N]``.
    """
    X, y = next(iter(get_mnist_dataloader(batch_size, shuffle, root)))
    return (X.flatten(1) if flat else X), y


def autograd_diag_ggn_exact(
    X: Tensor, y: Tensor, model: Module, loss_function: Callable[[Tensor, Tensor], Tensor], idx: int | Iterable[int] | Tensor | None = None
) -> Tensor:
    """Compute the diagonal of the generalized Gauss-Newton matrix column by column: slow, but independent of everything else.

    Args:
        X: Input of the model.
        y: Labels.
        model: The model.
        loss_function: Maps the model's output and the labels to a scalar, whose reduction sets the scaling.
        idx: Which diagonal entries to compute, counted over all trainable parameters in the order of ``model.parameters()``; all by default.

    Returns:
        Vector with the chosen diagonal entries, in the order of ``idx``.
    """
    entries = [column[index] for index, column in _autograd_ggn_exact_columns(X, y, model, loss_function, idx)]
    return torch.stack(entries) if entries else X.new_empty(0)


def _autograd_ggn_exact_columns(
    X: Tensor, y: Tensor, model: Module, loss_function: Callable[[Tensor, Tensor], Tensor], idx: int | Iterable[int] | Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Compute columns of the generalized Gauss-Newton matrix.

    Args:
        X: Input of the model.
        y: Labels.
        model: The model.
        loss_function: Maps the model's output and the labels to a scalar.
        idx: Which columns to compute.

    Yields:
        Index and column ``[P]``, for ``P`` trainable parameters.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    num_params = sum(param.numel() for param in params)
    indices = range(num_params) if idx is None else torch.as_tensor(idx if isinstance(idx, int | Tensor) else list(idx)).flatten().tolist()
    output = model(X)
    loss = loss_function(output, y)
    for index in indices:
        unit = torch.zeros(num_params, dtype=output.dtype, device=output.device)
        unit[index] = 1
        column = ggn_vector_product_from_plist(loss, output, params, vector_to_parameter_list(unit, params))
        yield index, torch.cat([part.flatten() for part in column])


def _find(root: Path, name: str) -> Path:
    candidates = [folder / file for folder in (root, root / "MNIST" / "raw") for file in (name, f"{name}.gz")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"MNIST is not there. Looked for {', '.join(map(str, candidates))}. Put MNIST's files there, or give their folder as root."
    )


def _read_idx(path: Path) -> Tensor:
    """Read a file of bytes in the IDX format: two zeros, type (8), number of axes, big-endian sizes, data.

    Args:
        path: The file, raw or compressed.

    Returns:
        The bytes, as a tensor of the stored shape.

    Raises:
        ArgumentError: If the file has another format, or is cut off.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ArgumentError(f"{path} is not a complete compressed file: {error}") from error
    start = 4 + 4 * content[3] if content[:3] == b"\x00\x00\x08" and len(content) > 3 else len(content)
    shape = numpy.frombuffer(content[4:start], dtype=">i4").tolist() if start < len(content) else [0]
    if prod(shape) != len(content) - start or start == len(content):
        raise ArgumentError(f"{path} is not a complete IDX file of unsigned bytes.")
    return torch.from_numpy(numpy.frombuffer(content, dtype=numpy.uint8, offset=start).reshape(shape).copy())
