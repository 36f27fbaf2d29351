"""Which replica takes a request: what is published, what is remembered, and the score. Neither ray nor vllm."""
