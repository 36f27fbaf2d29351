"""`dsde loadtest`: open-loop traffic over HTTP and gRPC against a running server, and a report of what came back."""
