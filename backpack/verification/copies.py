"""Copies of a model and its loss: they run in another precision, and leave the model and everything around it as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.backward import backpack
from backpack.core.graph import saved_tensors
from backpack.explaining import explain_loss
from backpack.extending import extend, unextend
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.differentiation import nodes_below
from backpack.utils.errors import ArgumentError
from backpack.utils.nested import call_with, tensors_in
from backpack.utils.random_state import random_state_kept
from backpack.verification.layers import uses


class Copies:
    """Makes and runs copies of a model and its loss, always in the same way."""

    def __init__(
        self,
        model: Module,
        lossfunc: Callable[..., Tensor],
        X: Any,
        y: Any,
        output: Callable[[Any], Tensor] | None,
        seed: int,
        dtype: torch.dtype | None,
    ) -> None:
        """Take what ``verify`` is given.

        Args:
            model: The model.
            lossfunc: The loss.
            X: What the model is called with.
            y: What the loss is called with after the output.
            output: Returns the tensor that enters the loss.
            seed: Seed of each run.
            dtype: Data type of the copies.
        """
        self._model, self._lossfunc, self._output, self._seed, self._dtype = model, lossfunc, output, seed, dtype
        self._X, self._y = X, y
        self._first_output: Tensor | None = None
        tensors = [*model.parameters(), *model.buffers()]
        self._devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Leave random generators, default types and active extensions as they are.

        Yields:
            Nothing.
        """
        before = torch.get_default_dtype()
        with random_state_kept([*self._model.parameters(), *self._model.buffers()]), torch.enable_grad(), backpack():
            try:
                torch.set_default_dtype(self._dtype or before)  # what a model creates while it runs goes with its parameters
                yield
            finally:
                torch.set_default_dtype(before)

    def copy(self, extension: BackpropExtension | None) -> tuple[Module, Callable[..., Tensor], BackpropExtension | None]:
        """Copy model and loss, and an extension, which may name parameters of the model.

        Args:
            extension: The extension.

        Returns:
            The copies, which are not extended.

        Raises:
            ArgumentError: If the model cannot be copied.
        """
        try:
            model, lossfunc, extension = deepcopy((self._model, self._lossfunc, extension))
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"verify() works on a copy of the model, but copy.deepcopy(model) failed: {error}{self._kept()}") from error
        for module in (model, lossfunc):
            if isinstance(module, Module):
                unextend(module)
                module._apply(self._converted)
        return model, lossfunc, extension

    def _converted(self, tensor: Tensor) -> Tensor:
        # unlike Module.to(), which drops imaginary parts
        if self._dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        return tensor.to(self._dtype.to_complex() if tensor.is_complex() else self._dtype)

    def _kept(self) -> str:
        modules = [(name, module) for root in (self._model, self._lossfunc) if isinstance(root, Module) for name, module in root.named_modules()]
        entries = [(f"{name}.{key}".lstrip("."), value) for name, module in modules for key, value in {**vars(module), **module._buffers}.items()]
        held = [name for name, value in entries if not name.endswith("_buffers") and any(tensor.grad_fn is not None for tensor in tensors_in(value))]
        if not held:
            return ""
        return f" Tensors of an earlier graph are kept in {', '.join(held)}: detach them, reset the state of the model, or give it before it has run."

    def forward(self, model: Module, lossfunc: Callable[..., Tensor]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run a copy.

        Args:
            model: The model.
            lossfunc: The loss.

        Returns:
            What enters the loss, and the loss as a function of it.

        Raises:
            ArgumentError: If it is no tensor with samples, if the copy still uses parameters of something else, or if two copies differ.
        """
        torch.manual_seed(self._seed)
        z = call_with(model, (), self._given(self._X))
        z = z if self._output is None else self._output(z)
        if not isinstance(z, Tensor) or not z.dim() or not len(z):
            what = f"a tensor of shape {list(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise ArgumentError(
                f"verify() needs a tensor [N, ...] that enters the loss, got {what}. Write output=lambda out: out.logits, say. Of a model "
                "that returns its loss, give the part that makes this tensor, and the loss as a function; explain() takes it whole, with "
                "lambda loss, y: loss."
            )
        if not z.requires_grad:
            raise ArgumentError("verify() found no parameter that requires a gradient and takes part in the output of the model.")
        self._refuse_foreign(z, model, lossfunc, "The model")
        if self._first_output is None:
            self._first_output = z.detach().clone()
        elif z.shape != self._first_output.shape or not torch.allclose(z.detach(), self._first_output, rtol=1e-3, equal_nan=True):
            raise ArgumentError("The model gives two different outputs after torch.manual_seed with the same seed, so that nothing can be compared.")
        arguments = self._given(self._y)

        def loss(output: Tensor) -> Tensor:
            value = call_with(lossfunc, (output,), arguments)
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise ArgumentError(f"verify() needs a loss that returns one number, got {what}. Use reduction='mean' or 'sum', or a function.")
            if output.requires_grad and not value.requires_grad:
                raise ArgumentError("verify() needs a loss that depends on the output of the model, and can be differentiated: this one is constant.")
            self._refuse_foreign(value, model, lossfunc, "The loss")
            return value

        return z, loss

    def _refuse_foreign(self, tensor: Tensor, model: Module, lossfunc: Any, what: str) -> None:
        if tensor.grad_fn is None:
            return
        own = {id(p) for module in (model, lossfunc) if isinstance(module, Module) for p in module.parameters()}
        names = {id(p): name for name, p in self._model.named_parameters()}
        leaves = [leaf for leaf in uses(tensor) if isinstance(leaf, Parameter) and id(leaf) not in own]
        if leaves:
            foreign = [names.get(id(leaf), f"one of shape {list(leaf.shape)}") for leaf in leaves]
            raise ArgumentError(
                f"{what} uses parameters that do not belong to the copies on which verify() works: {', '.join(foreign)}. Some function holds on to "
                "them: let it take them as an argument, or be a method of the model or of a loss module."
            )

    def _given(self, value: Any) -> Any:
        """Copy what a model or a loss is called with, and convert its floating-point numbers.

        Args:
            value: Tensors in tuples, lists and dictionaries, and anything else.

        Returns:
            The same with new tensors.
        """
        if isinstance(value, Tensor):
            new = self._converted(value.detach().clone())
            return new.requires_grad_(value.requires_grad)
        if isinstance(value, Mapping):
            return {key: self._given(entry) for key, entry in value.items()}
        if type(value) in (tuple, list):
            return type(value)(map(self._given, value))
        return value

    def precision(self) -> float:
        """Run a copy and observe how precise it is: some models compute in single precision inside, whatever they are given.

        Returns:
            The largest machine epsilon of what the forward pass keeps.

        Raises:
            ArgumentError: If it does not run.
        """
        model, lossfunc, _ = self.copy(None)
        try:
            z, loss = self.forward(model, lossfunc)
            kept = [z, *(tensor for node in nodes_below([loss(z)]) for tensor in saved_tensors(node))]
        except RuntimeError as error:
            hint = "" if self._dtype is None else f" It is a copy in {self._dtype}: with dtype=None, it keeps its own type."
            raise ArgumentError(f"verify() could not run the model and the loss: {error}.{hint}") from error
        return max(torch.finfo(tensor.dtype).eps for tensor in kept if tensor.is_floating_point() or tensor.is_complex())

    def keep_random_state(self) -> Callable[[], None]:
        """Remember where the random generators stand.

        Returns:
            A function that sets them back.
        """
        state, states = torch.get_rng_state(), [(device, torch.cuda.get_rng_state(device)) for device in self._devices]

        def rewind() -> None:
            torch.set_rng_state(state)
            for device, there in states:
                torch.cuda.set_rng_state(there, device)

        return rewind

    def run(self, extension: BackpropExtension) -> tuple[Module, dict[str, Any], set[str]]:
        """Let the library compute a quantity.

        Args:
            extension: The extension.

        Returns:
            The copy, which values that are functions need; value of each parameter that has one; names of those that are left out.
        """
        model, lossfunc, extension = self._extended(extension)
        with backpack(extension):
            z, loss = self.forward(model, lossfunc)
            loss(z).backward()
        excluded, field = extension.excluded(), extension.savefield
        named = dict(model.named_parameters())
        values = {name: vars(p)[field] for name, p in named.items() if field in vars(p)}
        return model, values, {name for name, p in named.items() if id(p) in excluded}

    def samples(self, extension: BackpropExtension) -> int | None:
        """Ask the library how many samples there are.

        Args:
            extension: For which extension.

        Returns:
            Their number; ``None`` if it finds none, or different numbers for different parameters.
        """
        model, lossfunc, extension = self._extended(extension)
        z, loss = self.forward(model, lossfunc)
        return explain_loss(model, loss(z), [extension]).samples

    def _extended(self, extension: BackpropExtension) -> tuple[Module, Callable[..., Tensor], BackpropExtension]:
        model, lossfunc, extension = self.copy(extension)
        for module in (model, lossfunc):
            if isinstance(module, Module):
                extend(module)
        return model, lossfunc, extension
