"""Random attention steps over a paged cache whose unused rows are NaN, and how far off one is."""

import torch

from nanovllm.utils.context import AttentionMetadata, LayerKV


def make_step(device, dtype, q_lens, k_lens, heads=(4, 2, 64), block_size=16, num_decode=0):
    """Random q and cache for sequences with q_lens new of k_lens tokens; all unused rows are NaN.

    Returns (q, k, v, layer_kv, metadata) as `attend` takes them.
    """
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(1)

    width = num_heads + 2 * num_kv_heads
    qkv = torch.randn(sum(q_lens), width, head_dim, generator=generator)
    q, k, v = qkv.to(device=device, dtype=dtype).split([num_heads, num_kv_heads, num_kv_heads], 1)
    blocks_of = [-(-length // block_size) for length in k_lens]
    num_blocks = sum(blocks_of) + 2
    cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"))
    cache = cache.to(device=device, dtype=dtype)
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    tables = torch.zeros(len(k_lens), max(*blocks_of, 1) + 1, dtype=torch.int32)
    used = first = 0
    for i, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        blocks = order[used : used + blocks_of[i]]
        used += blocks_of[i]
        tables[i, : len(blocks)] = blocks
        tokens = torch.arange(k_len)
        slots = (blocks[tokens // block_size] * block_size + tokens % block_size).to(device)
        stored = torch.randn(2, k_len, num_kv_heads, head_dim, generator=generator)
        stored = stored.to(device=device, dtype=dtype)
        if k_len:
            stored[0, k_len - q_len :] = k[first : first + q_len]
            stored[1, k_len - q_len :] = v[first : first + q_len]
        cache.flatten(1, 2)[:, slots] = stored
        first += q_len

    def offsets(lengths):
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(device)

    meta = AttentionMetadata(
        slot_mapping=torch.full((sum(q_lens),), -1, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        cu_seqlens_q=offsets(q_lens),
        seqlens_k=torch.tensor(k_lens, dtype=torch.int32, device=device),
        cu_seqlens_k=offsets(k_lens),
        num_decode_seqs=num_decode,
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(k_lens),
        has_prefix=q_lens[num_decode:] != k_lens[num_decode:],
    )
    return q, k, v, LayerKV(*cache), meta


def assert_heads_close(
    out,  # [N, Hq, D]
    expected,
    tolerance=0.015,
):
    """Compare each head of each token by the norm of the difference, relative to its own norm.

    bfloat16 stays below 1 %. A bound on single elements would be blind at long contexts, where
    outputs are small: dropping the last token of each 256 passed unseen.
    """
    assert out.isfinite().all()
    norms = expected.float().norm(dim=-1).clamp_min(1e-6)  # padded rows are zero
    errors = (out.float() - expected.float()).norm(dim=-1) / norms
    worst = errors.max().item()
    assert worst < tolerance, (
        f"off by {worst:.4f} at {divmod(errors.argmax().item(), out.shape[1])}"
    )
