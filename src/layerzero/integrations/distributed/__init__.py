"""Ranks of a process group that choose alike.

    lz.distributed.init("inference", group=tensor_parallel_group)
    lz.distributed.agree(model, example)       # ahead, or: lz.distributed.sync() now and then

`init` compares versions, policy, capabilities and tables of the ranks. A difference is an error in
training; in inference the kernels that not all ranks have alike serve no more, and an event says
so. The parallel layers (column_linear, ...) give the same bits on 1, 2 and 4 ranks.
"""
