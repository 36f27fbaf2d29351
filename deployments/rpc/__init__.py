"""The gRPC service: messages to OpenAI bodies and back, status codes, and Serve's proxy that carries it."""
