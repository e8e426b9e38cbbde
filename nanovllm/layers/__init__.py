"""Tensor building blocks; they know tensors and tensor-parallel ranks, not requests.

Dims legend, used in every shape comment of the package:

    N   tokens in the step (all sequences, flattened)
    B   sequences in the step
    Hq  query heads on this rank            Hkv  key/value heads on this rank
    D   head_dim                            C    hidden_size
    I   MLP intermediate size on this rank  V    vocabulary (padded, on this rank where sharded)
    S   block_size, tokens per KV block     L    layers
"""
