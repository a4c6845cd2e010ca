"""The protocol in which users write what an extension does for a module class of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, takewhile
from typing import Any, ClassVar
from warnings import warn

from torch import Tensor
from torch.nn import Module, Parameter

from backpack.utils.errors import ArgumentTypeError, LossNotExtendedError, UnsupportedError
from backpack.utils.module_classification import is_loss

Grads = tuple[Tensor | None, ...]


class ModuleExtension:
    """What an extension computes for the parameters of one module class.

    For every name in ``params`` there is a method of that name,

        ``def weight(self, extension, module, g_inp, g_out, bpQuantities) -> Any``

    whose result is saved on the parameter. ``module.input0``, ... and ``module.output`` are the tensors of this execution, ``g_out[0]`` is the
    gradient with respect to the output, ``bpQuantities`` what the extension's flow carries there (``None`` for first-order extensions; columns
    ``[V, *output]`` for those of the generalized Gauss-Newton; a matrix ``[D, D]`` over the ``D`` features of a sample for ``KFRA``; for ``HMP``,
    ``GGNMP`` and ``PCHMP`` a function that multiplies ``[V, *output]``).

    Attributes:
        any_layout: Whether the methods also hold where the samples are not on axis 0 of the output, one a row. Else such calls are refused.
    """

    any_layout: ClassVar[bool] = False

    def __init__(self, params: Sequence[str] | None = None) -> None:
        """Name the parameters.

        Args:
            params: Names of parameters for which a method exists.

        Raises:
            ArgumentTypeError: If it is a single name.
            UnsupportedError: If a method is missing.
        """
        if isinstance(params, str):
            raise ArgumentTypeError(f"{type(self).__name__} needs a list of names of parameters, got {params!r}. Write params=[{params!r}].")
        self.params = tuple(params or ())
        for name in self.params:
            if not callable(getattr(self, name, None)):
                raise UnsupportedError(
                    f"{type(self).__name__} names the parameter {name!r}, but has no method for it. "
                    f"Define `def {name}(self, extension, module, g_inp, g_out, bpQuantities)`."
                )

    def backpropagate(self, extension: Any, module: Module, g_inp: Grads, g_out: Grads, bpQuantities: Any) -> Any:  # noqa: N803
        """Map what the extension carries from the module's output to its input. The default warns and carries nothing.

        Args:
            extension: The extension.
            module: The module.
            g_inp: Gradients with respect to the inputs, ``None`` where not computed.
            g_out: Gradient with respect to the output.
            bpQuantities: What arrives at the output.
        """
        warn(f"{type(self).__name__}.backpropagate is not defined: extension {extension.savefield!r} stops at {module}.", stacklevel=2)

    def check_hyperparameters_module_extension(self, ext: Any, module: Module, g_inp: Grads, g_out: Grads) -> None:
        """Raise for settings of the module that the rule does not support. The default supports everything.

        Args:
            ext: The extension.
            module: The module.
            g_inp: Gradients with respect to the inputs.
            g_out: Gradient with respect to the output.
        """

    def __call__(self, extension: Any, module: Module, g_inp: Grads, g_out: Grads) -> None:
        """Save the quantities of a module's parameters, and hand on what the extension carries, by hand.

        What is carried is found again by the memory of the tensors, so that modules have to be visited in the order of a backward pass. Passes under
        ``backpack`` know the graph, and do not come here.

        Args:
            extension: The extension.
            module: A module whose last forward pass is recorded.
            g_inp: Gradients with respect to the inputs, ``None`` where not known.
            g_out: Gradient with respect to the output.

        Raises:
            LossNotExtendedError: If the extension carries something, and nothing has arrived.
        """
        saved, carries = extension.saved_quantities, extension.expects_backpropagation_quantities()
        arrived = saved.retrieve_quantity(module.output.data_ptr(), delete_old=True) if carries else None
        if carries and arrived is None and not is_loss(module):
            raise LossNotExtendedError(f"Nothing that {extension.savefield!r} carries has arrived at {module}. Visit the modules below it first.")
        for name, value in self.compute(extension, module, g_inp, g_out, arrived).items():
            setattr(getattr(module, name), extension.savefield, value)
        if carries:
            sent = self.backpropagate(extension, module, g_inp, g_out, arrived)
            inputs = takewhile(lambda value: value is not None, (getattr(module, f"input{i}", None) for i in count()))
            for tensor in (value for value in inputs if isinstance(value, Tensor)):
                saved.save_quantity(tensor.data_ptr(), sent, extension.accumulate_backpropagated_quantities)

    def compute(self, extension: Any, module: Module, g_inp: Grads, g_out: Grads, bp_quantities: Any) -> dict[str, Any]:
        """Compute the quantity of each parameter that exists, is trainable and is not excluded.

        Args:
            extension: The extension.
            module: The module.
            g_inp: Gradients with respect to the inputs.
            g_out: Gradient with respect to the output.
            bp_quantities: What the extension carries at the output.

        Returns:
            Parameter name to quantity.
        """
        self.check_hyperparameters_module_extension(extension, module, g_inp, g_out)
        wanted = self.wanted(extension, module)
        return {name: getattr(self, name)(extension, module, g_inp, g_out, bp_quantities) for name in wanted}

    def wanted(self, extension: Any, module: Module) -> dict[str, Parameter]:
        """Find the parameters that get a quantity.

        Args:
            extension: The extension.
            module: The module.

        Returns:
            Name to parameter, for each one that exists, is trainable and is not excluded.
        """
        parameters, excluded = {name: getattr(module, name, None) for name in self.params}, extension.excluded()
        return {name: p for name, p in parameters.items() if p is not None and p.requires_grad and id(p) not in excluded}
