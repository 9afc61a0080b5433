"""Training loops: collect, step, grpo, sft."""
