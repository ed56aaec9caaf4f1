"""The keys of config.json that cannot change what a model computes, whatever their value.

Knows names alone. A key is listed here only if no supported family computes with it at inference.
"""

from __future__ import annotations

from typing import Final

_BOOKKEEPING = """
_auto_class _commit_hash _model_name_or_path _name_or_path _num_labels auto_map base_model
finetuned finetuning_task id2label is_llama_config label2id license model_name model_name_or_path
name_or_path num_labels problem_type processor_class task_specific_params torchscript
transformers.js_config transformers_version"""

_TRAINING_ONLY = """
activation_dropout attention_dropout attention_dropout_prob attention_probs_dropout_prob attn_pdrop
classifier_dropout classifier_dropout_prob dropout dropout_rate embd_pdrop embedding_dropout
ffn_dropout hidden_dropout hidden_dropout_prob layerdrop mlp_dropout resid_dropout resid_pdrop
residual_dropout
gradient_checkpointing init_std initializer_factor initializer_range
aux_loss_alpha aux_loss_coef router_aux_loss_coef router_jitter_noise router_z_loss_coef seq_aux"""

_OTHER_OUTPUTS = """
classifier_activation classifier_bias is_decoder n_special output_attentions output_hidden_states
output_router_logits output_scores predict_special_tokens return_dict return_dict_in_generate
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
tie_encoder_decoder use_cache"""

_FURTHER_AHEAD = """
mtp_num_hidden_layers mtp_use_dedicated_embeddings num_mtp_layers num_nextn_predict_layers"""

_SAME_MATHS = """
_flash_attn_2_enabled attn_implementation cache_implementation chunk_size_feed_forward ep_size
experts_implementation flash_attn kernel_options n_ctx pretraining_tp reorder_and_upcast_attn
tf_legacy_loss use_bfloat16 use_flash_attention use_flash_attention_2 use_flash_attn use_kernels
xla_device"""
"""How other programs compute the same, and in which dtype."""

_TOKENIZER = """
add_bos_token add_eos_token additional_special_tokens bos_token chat_template
clean_up_tokenization_spaces cls_token cls_token_id eos_token legacy mask_token mask_token_id
max_seq_len max_seq_length max_sequence_length model_max_length pad_token pad_token_id padding_side
sep_token sep_token_id seq_length tokenizer_class truncation_side unk_token unk_token_id"""
"""What tokenizer_config.json says, if it counts."""

_GENERATION_DEFAULTS = """
bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff
exponential_decay_length_penalty guidance_scale length_penalty low_memory max_length max_new_tokens
min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_beam_groups num_beams
num_return_sequences penalty_alpha prefix remove_invalid_values renormalize_logits
repetition_penalty stop_strings suppress_tokens temperature top_k top_p typical_p"""

_KEYS: Final = frozenset(
    " ".join(
        (
            *(_BOOKKEEPING, _TRAINING_ONLY, _OTHER_OUTPUTS, _FURTHER_AHEAD, _SAME_MATHS),
            *(_TOKENIZER, _GENERATION_DEFAULTS),
        )
    ).split()
)
_PREFIXES: Final = ("_attn_implementation", "_experts_implementation", "forced_", "unsloth_")


def is_harmless(key: str) -> bool:
    """Say whether a key changes nothing in the logits, whatever its value."""
    return key in _KEYS or key.startswith(_PREFIXES)
