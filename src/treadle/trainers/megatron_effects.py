"""Arguments of Megatron-LM that the estimate does not follow: which of them change a step or its memory."""

from __future__ import annotations

import re
from collections.abc import Mapping

_STEP, _MEMORY, _BOTH = "step", "memory", "step and memory"

ASSUMED: Mapping[str, tuple[str, str]] = {
    "attention_backend": (_BOTH, "auto flash fused AttnBackend.auto AttnBackend.flash AttnBackend.fused"),
    "transformer_impl": (_BOTH, "transformer_engine"),
    "gradient_accumulation_fusion": (_BOTH, "True"),
    "masked_softmax_fusion": (_BOTH, "True False"),
    "bias_gelu_fusion": (_BOTH, "True"),
    "bias_swiglu_fusion": (_BOTH, "True"),
    "bias_dropout_fusion": (_BOTH, "True"),
    "apply_rope_fusion": (_STEP, "True"),
    "persist_layer_norm": (_STEP, "True"),
    "overlap_p2p_comm": (_STEP, "True"),
    "overlap_grad_reduce": (_STEP, "True"),
    "overlap_param_gather": (_STEP, "True"),
    "moe_grouped_gemm": (_STEP, "True"),
    "moe_permute_fusion": (_BOTH, "True"),
    "moe_router_fusion": (_STEP, "True"),
    "cross_entropy_loss_fusion": (_MEMORY, "True"),
    "cross_entropy_fusion_impl": (_MEMORY, "native te"),
    "moe_token_dispatcher_type": (_STEP, "alltoall flex"),
    "cp_comm_type": (_STEP, "p2p"),
    "normalization": (_STEP, "RMSNorm"),
    "attention_softmax_in_fp32": (_STEP, "True False"),
    "apply_query_key_layer_scaling": (_STEP, "True False"),
    "use_flash_attn": (_BOTH, "True"),
    "attention_dropout": (_BOTH, "0.0 0"),
    "hidden_dropout": (_BOTH, "0.0 0"),
    "deterministic_mode": (_STEP, "False"),
    "optimizer": (_BOTH, "adam"),
    "use_mcore_models": (_STEP, "True"),
    "distributed_backend": (_STEP, "nccl"),
    "position_embedding_type": (_STEP, "rope learned_absolute none yarn"),
    "rotary_percent": (_STEP, "1.0"),
    "softmax_type": (_STEP, "vanilla"),
    "fp8_param_gather": (_BOTH, "False"),
    "first_last_layers_bf16": (_BOTH, "False"),
    "num_distributed_optimizer_instances": (_BOTH, "1"),
    "moe_router_load_balancing_type": (_STEP, "aux_loss seq_aux_loss global_aux_loss none"),
    "moe_router_pre_softmax": (_STEP, "True False"),
    "moe_router_dtype": (_STEP, "fp32"),
    "moe_router_score_function": (_STEP, "softmax sigmoid"),
    "moe_router_enable_expert_bias": (_STEP, "True False"),
    "swiglu": (_BOTH, "True False"),
    "squared_relu": (_BOTH, "True False"),
    "quick_geglu": (_BOTH, "True False"),
    "manual_gc": (_STEP, "True"),
    "calculate_per_token_loss": (_STEP, "True False"),
}
"""What each argument touches, and the values that the estimate is made for. Those about softmax change a step where
attention is not fused, which `attention_backend` reports."""

_UNMODELLED = {
    _STEP: "tp_comm_overlap defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute "
    "overlap_p2p_comm_warmup_flush microbatch_group_size_per_virtual_pipeline_stage align_grad_reduce "
    "moe_shared_expert_overlap moe_pad_expert_input_to_capacity moe_expert_capacity_factor moe_flex_dispatcher_backend "
    "moe_enable_deepep overlap_param_gather_with_optimizer_step hierarchical_context_parallel_sizes "
    "tp_comm_overlap_cfg ddp_average_in_collective ddp_bucket_size use_tp_pp_dp_mapping error_injection_rate "
    "moe_shared_expert_gate check_weight_hash_across_dp_replicas_interval nccl_ub use_sharp "
    "batch_p2p_comm batch_p2p_sync moe_layer_recompute step_batch_size_schedule rampup_batch_size glu_linear_offset "
    "activation_func_clamp_value barrier_with_L1_time fp8_wgrad fp8_margin apply_layernorm_1p",
    _MEMORY: "empty_unused_memory_level moe_use_legacy_grouped_gemm keep_fp8_transpose_cache "
    "megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype main_params_dtype "
    "distribute_saved_activations reuse_grad_buf_for_mxfp8_param_ag",
    _BOTH: "optimizer_cpu_offload optimizer_offload_fraction cpu_offloading cpu_offloading_num_layers fp16 "
    "experimental_attention_variant linear_attention_freq attention_output_gate linear_conv_kernel_dim "
    "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads dsa_indexer_n_heads "
    "dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff hybrid_layer_pattern "
    "heterogeneous_layers_config_path "
    "use_transformer_engine_op_fuser num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp32_residual_connection "
    "outer_dp_sharding_strategy export_kd_teacher_load export_kd_cfg moe_latent_size decoupled_attention "
    "reset_attention_mask fp8_dot_product_attention fp8_multi_head_attention",
}
UNMODELLED = {name: effect for effect, names in _UNMODELLED.items() for name in names.split()}
"""Arguments that the estimate has no part for, by what they touch."""

_NEITHER = re.compile(
    r"(log|timing|tensorboard|wandb|save|load|no_load|no_save|ckpt|dist_ckpt|no_ckpt|async_|auto_detect_ckpt|lr|min_lr|"
    r"decoupled_|weight_decay|adam|muon|sgd|clip_grad|seed|split|data_|dataloader|mock_data|tokenizer|vocab_|merge_|"
    r"tiktoken|train_|valid_|test_|eval|exit|inference|rl_|no_rl|grpo|langrl|perform_rl|distributed_timeout|"
    r"init_method|attention_mask|no_create|create_|mmap|no_mmap|use_checkpoint|use_persistent|override_|"
    r"num_workers|manual_gc_interval|norm_epsilon|layernorm_epsilon|rotary_|use_rotary|mscale|yarn|no_yarn|"
    r"max_position|moe_aux|moe_z|moe_router_topk_sc|moe_router_bias|mtp_loss|loss_scale|initial_loss|hysteresis|rerun|"
    r"straggler|verify_integrity|te_rng|profile|use_pytorch_profiler|fim_|finetune|pretrained|temperature|top_|"
    r"num_tokens|output|prompt|incoming|max_tokens|return_|no_use_tok|stop_words|suspend|flash_decode|use_legacy|"
    r"enable_chunked|use_coordinator|decode_only|termination|no_check|check_for|disable_gloo|use_flashinfer|"
    r"error_injection_type|apply_wd|use_mup|mup_|refit|expert_tensor_model|local_rank|rank|world_size|"
    r"export_te|moe_pad_experts_for_cuda|moe_enable_routing_replay|cuda_graph_warmup|no_use_layer_wise|use_mamba|"
    r"iteration|consumed|padded_vocab|make_vocab|legacy|spec|start_weight|end_weight|logging|config_logger|"
    r"enable_experimental|replication|non_persistent|nvidia|enable_ft|enable_one|one_logger|app_tag|bert_|biencoder|classes|retriever|"
    r"dino|iter_per|img_|image|patch|num_channels|num_classes|vision|mask_|short_seq|query_in|titles|"
    r"encoder_|decoder_seq|decoder_num|transformer_pipeline|data_parallel_size|group_query|variable_seq|params_dtype)"
)
"""Arguments that touch neither: what is logged, saved, evaluated, tokenised, and how the optimizer is set."""


def effect_of(name: str, words: list[str]) -> str:
    """Return what an argument touches that the estimate does not follow; "" if nothing, or as it assumes."""
    if name in ASSUMED:
        effect, values = ASSUMED[name]
        return "" if words[0] in values.split() else effect
    if words[0] in ("None", "False", "[]", "") and name in UNMODELLED:
        return ""
    return UNMODELLED.get(name) or ("" if _NEITHER.match(name) else "unknown")


def touches(name: str) -> bool:
    """Return True if an argument is about the step or its memory, as far as is known."""
    return name in ASSUMED or name in UNMODELLED or _NEITHER.match(name) is None
