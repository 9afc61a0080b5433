"""What runs inside a vLLM server's own environment. Each file stands alone: nothing of groupline is imported there."""
