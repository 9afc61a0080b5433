"""Models: loading, shared-prefix attention for any transformers decoder, log-probs without whole logits, LoRA."""
