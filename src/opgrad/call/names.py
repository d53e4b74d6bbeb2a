"""What people call with arrays: all names of `opgrad`."""

from opgrad.call.losses import (
    CrossEntropyOutput,
    cross_entropy,
    cross_entropy_and_grad,
    linear_cross_entropy,
    linear_cross_entropy_and_grad,
    linear_jsd,
    linear_jsd_and_grad,
    linear_kl_div,
    linear_kl_div_and_grad,
)
from opgrad.call.operators import *  # noqa: F403
from opgrad.call.user_plans import PlannedCall, plan
from opgrad.cpu.runtime.pool import empty_pool
from opgrad.cpu.runtime.threads import get_num_threads, set_num_threads
from opgrad.ops import public_operators
from opgrad.ops.reference.dropout import Dropout

__all__ = [
    "CrossEntropyOutput",
    "Dropout",
    "PlannedCall",
    "cross_entropy",
    "cross_entropy_and_grad",
    "empty_pool",
    "get_num_threads",
    "linear_cross_entropy",
    "linear_cross_entropy_and_grad",
    "linear_jsd",
    "linear_jsd_and_grad",
    "linear_kl_div",
    "linear_kl_div_and_grad",
    "plan",
    "set_num_threads",
]
__all__.extend(public_operators())
