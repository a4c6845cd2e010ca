"""First-order extensions: functions of the per-sample gradients.

They need no extended loss: any tensor on which ``backward`` is called will do. ``g_n`` is the gradient of sample ``n``'s summand, as it enters
``.grad``: with a mean loss it contains the divisor.
"""

from backpack.extensions.firstorder.batch_grad import BatchGrad
from backpack.extensions.firstorder.batch_l2_grad import BatchL2Grad
from backpack.extensions.firstorder.sum_grad_squared import SumGradSquared
from backpack.extensions.firstorder.variance import Variance

__all__ = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"]
