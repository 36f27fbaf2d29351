"""`dsde client`: one question to a running server, over HTTP or gRPC, for a human to read."""
