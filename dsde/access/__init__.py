"""Who may ask, and how much: API keys, their limits, and the gate that HTTP and gRPC share. Needs no vLLM."""
