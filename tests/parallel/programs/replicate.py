"""Everything that `unisono.parallel.replicate` promises, on the ranks of one job, against one process and against DDP.

replicate.py BACKEND [CHECK ...]
"""

import sys

from replicate_errors import failures, late_ranks, wrong_arguments, wrong_models
from replicate_gradients import (
    accumulation,
    bits_of_ddp,
    checkpointing,
    kept_gradients_keep_their_values,
    like_one_process,
    sparse_gradients,
    sums_survive_autograd_grad,
    types_and_layouts,
    unused_parameters,
)
from replicate_uses import (
    buffers,
    frozen_and_changed,
    groups,
    hooks,
    penalties_on_gradients,
    several_models,
    uneven_batches,
)
from replicate_weights import (
    borrowed_samples_count_as_nothing,
    compiled,
    loaders_that_do_not_fit,
    weighted_by_the_loader,
    weights_and_the_life_of_a_model,
    weights_of_kept_gradients,
)

for check in (like_one_process, bits_of_ddp, unused_parameters, accumulation,
              kept_gradients_keep_their_values, sums_survive_autograd_grad, checkpointing, several_models,
              frozen_and_changed, types_and_layouts, sparse_gradients, buffers, uneven_batches, hooks, compiled,
              penalties_on_gradients, groups, failures, wrong_models, wrong_arguments, weighted_by_the_loader,
              borrowed_samples_count_as_nothing, weights_of_kept_gradients, loaders_that_do_not_fit,
              weights_and_the_life_of_a_model, late_ranks):  # fmt: skip
    if len(sys.argv) > 2 and check.__name__ not in sys.argv[2:]:
        continue
    check()
    print(check.__name__, flush=True)
