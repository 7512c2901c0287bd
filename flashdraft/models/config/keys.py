"""Keys of a checkpoint's JSON files that change nothing here, each with the reason.

A key that is neither read nor in these tables is refused (values.py). So a table must be
generous with what ordinary checkpoints carry, and must never name what changes the forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

Reasons = Mapping[str, str]  # a reason, and the keys that it holds for

DESCRIPTION: Reasons = {
    "who made the file, and with what": """
        transformers_version torch_dtype dtype name_or_path model_name base_model
        base_model_name_or_path license tokenizer_class tokenizer_name
        finetuning_task task_specific_params transformers.js_config is_llama_config onnx
        pipeline_tag library_name language tags description vocab_file hf_device_map""",
    "the model type says what a model is, and code in a checkpoint is never run": """
        architectures auto_map""",
    "ids of tokens that the tokenizer puts in, unless a family reads one": """
        pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
        bos_token eos_token pad_token unk_token mask_token_id""",
}
TRAINING: Reasons = {
    "it matters only while training": """
        initializer_range attention_dropout hidden_dropout hidden_dropout_prob attn_pdrop embd_pdrop
        resid_pdrop dropout embedding_dropout classifier_dropout attention_probs_dropout_prob
        gradient_checkpointing loss_type problem_type id2label label2id num_labels
        output_router_logits router_aux_loss_coef neftune_noise_alpha pretraining_tp
        use_liger_kernel z_loss max_sequence_length max_seq_len seq_length
        model_max_length tokenizer_model_max_length recompute max_model_len training_max_length
        mlp_dropout original_max_position_embeddings bf16 fp16""",
}
EXECUTION: Reasons = {
    "it says how, not what, another engine computes": """
        use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16
        attn_implementation tf_legacy_loss pruned_heads chunk_size_feed_forward use_flash_attn
        use_flashattn use_flash_attention flash_attn use_memory_efficient_attention
        cache_implementation keys_to_ignore_at_inference tensor_parallel_size ep_size
        use_fused_qkv is_decoder output_past""",
    "transformers once kept settings of generation in every config; requests set them here": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p typical_p repetition_penalty length_penalty num_return_sequences
        output_scores return_dict_in_generate remove_invalid_values""",
}
# of the whole config of a multimodal model
OTHER_MODALITIES: Reasons = {
    "no sounds are taken, and films are taken as pictures": "audio_config video_config",
}
VISION: Reasons = {
    "positions are looked up in a table, whose size position_embedding_size says": """
        max_position_embeddings""",
}
_MEDIA = re.compile(r"(vision|image|audio|video|mm|multimodal|projector|media)_\w+")
_PRIVATE = re.compile(r"_\w+|unsloth_\w+|quantization_config|compression_config")

LLAMA: Reasons = {
    "transformers' Llama has full attention, whatever these say": """
        sliding_window use_sliding_window max_window_layers""",
}
MISTRAL: Reasons = {}
QWEN3: Reasons = {
    "use_sliding_window is false; where it is true, this is read": "sliding_window",
}
QWEN2: Reasons = {
    **QWEN3,
    "queries, keys and values have biases, whatever it says": "attention_bias",
}
QWEN3_MOE: Reasons = {
    **QWEN3,
    "every layer has experts, and transformers' class slides everywhere or nowhere": """
        max_window_layers""",
}
GEMMA3: Reasons = {
    "layer_types spells the pattern out": "sliding_window_pattern",
}
GEMMA4: Reasons = {
    "it is the size of a table that models without per-layer inputs do not have": """
        vocab_size_per_layer_input""",
    "the sizes of a mixture; read where enable_moe_block says that there is one": """
        num_experts top_k_experts moe_intermediate_size""",
    "of the sliding layers, whose pattern layer_types spells out": """
        sliding_window sliding_window_pattern""",
}
DRAFTER: Reasons = {
    "the drafter has its target's embeddings, head and stop tokens": """
        eos_token_id bos_token_id tie_word_embeddings""",
    "how it was trained": """
        num_anchors max_anchors loss_decay_gamma loss_gamma loss_type anchor_sampling
        num_training_anchors""",
    "it says what the target is; the tensors' own shapes tell whether it fits": """
        target_model target_model_name target_model_type target_model_name_or_path
        target_num_hidden_layers target_vocab_size""",
}
SPECULATORS: Reasons = {
    "who made the file, and for which target": """
        speculators_version speculators_config has_no_defaults_at_init""",
}
# of a quantization_config
_QUANTIZER: Reasons = {
    "it chose the reader": "quant_method",
    "who made the file, with what and from what": """
        meta producer model_name_or_path model_file_base_name method""",
    "the tensors tell which weights are in few bits": """
        modules_to_not_convert modules_in_block_to_quantize block_name_to_quantize exclude_modules
        ignore config_groups module_name_preceding_first_block lm_head""",
}
GPTQ: Reasons = {
    **_QUANTIZER,
    "how its codes were searched for": """
        damp_percent damp_auto_increment static_groups true_sequential mse gptaq foem v2 v2_alpha
        v2_memory_device act_group_aware hyb_act dataset tokenizer batch_size pad_token_id
        model_seqlen cache_block_outputs
        autoround_version amp enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
        gradient_accumulate_steps iters lr minmax_lr nsamples seqlen low_gpu_mem_usage
        low_cpu_mem_usage to_quant_block_names quant_block_list scale_dtype""",
    "activations are not rounded here": """
        act_bits act_data_type act_dynamic act_group_size act_sym""",
    "how another engine computes": """
        use_cuda_fp16 use_exllama disable_exllama exllama_config max_input_length backend device
        cache_examples_on_gpu""",
}
AWQ: Reasons = {
    **GPTQ,
    "zero_point says it": "sym",
    "how another engine joins layers": "do_fuse fuse_max_seq_len modules_to_fuse",
}
MODELOPT: Reasons = {
    **_QUANTIZER,
    "the key/value cache is not rounded here": "kv_cache_quant_algo kv_cache_scheme",
}
COMPRESSED: Reasons = {
    **_QUANTIZER,
    "who made the file, and how small it became": "version global_compression_ratio",
    "the key/value cache is not rounded here": "kv_cache_scheme",
}
COMPRESSED_GROUP: Reasons = {
    "read before the rest of its group": "format weights",
    "the tensors tell which weights are in few bits": "targets",
}
COMPRESSED_WEIGHTS: Reasons = {
    "how scales were searched for": "observer observer_kwargs",
    "the tensors tell their own types": "scale_dtype zp_dtype",
}
FP8: Reasons = {
    **_QUANTIZER,
    "the tensors tell which weights are in few bits, too": "ignored_layers",
    "activations and the key/value cache are not rounded here": """
        activation_scheme kv_cache_scheme""",
    "scales that are powers of 2 are read as any others": "scale_fmt",
}
GENERATION: Reasons = {
    **DESCRIPTION,
    **EXECUTION,
    "a request says how long its answer may be": """
        max_new_tokens min_new_tokens max_time max_matching_ngram_size max_context_len
        max_window_size chat_format""",
    "sampling settings, read where a request gets its defaults": "min_p",
    "a request's prompt is taken as it is": "bos_token_id token_healing",
    "how another engine drafts, batches, caches or compiles": """
        is_assistant num_assistant_tokens num_assistant_tokens_schedule speculation_type use_mtp
        assistant_confidence_threshold prompt_lookup_num_tokens assistant_early_exit
        assistant_lookbehind target_lookbehind assistant_ensemble_weight low_memory
        cache_config max_cache_len compile_config disable_compile continuous_batching_config
        prefill_chunk_size output_logits renormalize_logits trust_remote_code""",
}
# what a generation_config.json may say only if it says nothing: the value that switches it off
GENERATION_OFF: Mapping[str, float] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "typical_p": 1.0,
    "length_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "top_h": 1.0,
    "num_return_sequences": 1,
}


def listed(*tables: Reasons) -> Callable[[str], bool]:
    """Whether a key is in one of these tables."""
    found = (keys.split() for table in tables for keys in table.values())
    return {key for some in found for key in some}.__contains__


def irrelevant(*tables: Reasons, multimodal: bool = False) -> Callable[[str], bool]:
    """Whether a key changes nothing, by these tables and by those that hold for every model."""
    is_known = listed(*tables, DESCRIPTION, TRAINING, EXECUTION)

    def holds(key: str) -> bool:
        is_media = multimodal and _MEDIA.fullmatch(key) is not None
        return is_known(key) or is_media or _PRIVATE.fullmatch(key) is not None

    return holds
