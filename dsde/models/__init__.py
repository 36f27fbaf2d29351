"""The models dsde brings along, how they are made, and the checks any pair must pass before it is served."""
