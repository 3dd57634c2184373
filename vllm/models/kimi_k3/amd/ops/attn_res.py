from vllm.models.kimi_k3.cpu.attn_res import attn_res as cpu_attn_res


# fork: edit af71c5dc21e5
def attn_res(
    prefix,
    delta,
    blocks,
    norm_weight,
    qk_weight,
    output_norm_weight,
    num_blocks,
    block_write_idx,
    eps,
    output_norm_eps,
):
    # fork: at start
    if prefix.device.type == "cpu":
        return cpu_attn_res(
            prefix,
            delta,
            blocks,
            norm_weight,
            qk_weight,
            output_norm_weight,
            num_blocks,
            block_write_idx,
            eps,
            output_norm_eps,
        )
